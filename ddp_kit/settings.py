"""The numbers that you may want to change: defaults, time limits, how much is kept and shown.

Change them in this file and restart the kernel: every rank reads the file, too. Numbers that belong
to an algorithm, a file format or the look of a picture are in the modules that use them.
"""

# --- processes
WORLD_SIZE = 4  # ranks of a run, or of each host under torchrun, unless it says how many
WARM_START_MEMORY = 2 << 30  # bytes that must be available for ranks to start in the background
RANK_MEMORY = 250e6  # bytes that a process uses once it has imported torch
RANKS_NEVER_REFUSED = 4  # however little memory is free, because a system can also swap
# PyTorch gets a rank's share of the cores as threads: `threads_per_rank` in backends/__init__.py.

# --- time limits, in seconds
START_TIMEOUT = 300.0  # for fresh processes to import torch and join a group
JOIN_TIMEOUT = 300.0  # for ranks of torchrun to join, and for each collective of a script's ranks
UNUSED_RANKS_END_AFTER = 600.0  # without a run
FAILURE_GRACE = 0.3  # after each failure, in which ranks that wait may still report
LONGEST_FAILURE_GRACE = 1.5  # after the first failure; then no more reports are awaited

# --- deadlocks, in seconds
RUN_JUDGED_AFTER = 0.5  # in which nothing moves
RANKS_JUDGED_AFTER = 1.0  # in which they do not move while others do
NO_VERDICT_SAID_AFTER = 5.0  # a line then names the thread that keeps ranks from being judged

# --- other hosts, in seconds
SIGN_OF_LIFE_EVERY = 0.25
HOST_LOST_AFTER = 30.0  # without a sign of life
CUT_HOST_LOST_AFTER = 2.0  # the same, if connections to the host were lost too
HOSTS_CONFIRM_WITHIN = 3.0  # that nothing moves there
HOSTS_EXPLAIN_WITHIN = 3.0  # why connections to them were lost
STORE_ANSWERS_WITHIN = 30.0  # that of torchrun's agent on this host

# --- traces
EVENTS_KEPT = 1 << 16  # of a rank; new ones overwrite the oldest

# --- output of one rank in one run
OUTPUT_KEPT = 200_000  # bytes of what it prints: half of them the last
OUTPUT_LINES_SHOWN, OUTPUT_CHARACTERS_SHOWN = 200, 20_000  # of these, below a cell
DISPLAYED_KEPT = 10_000_000  # bytes of figures, tables and HTML; the rest is left out
VALUE_SHOWN = 1_500  # characters of a value, or of displayed text

# --- the live view
LIVE_ROWS = 16  # if there are more ranks, those that do the same share a row
LIVE_LINE_SHOWN = 100  # characters of the line that a rank printed last
LIVE_WAIT_SHOWN_AFTER = 0.2  # seconds
LIVE_VIEW_OLD_AFTER = 10  # seconds without an update; it has one every second

# --- pictures
TIMELINE_MARKS, TIMELINE_STEPS = 240, 48  # above, a timeline draws events as shares of time
TIMELINE_LINES = 400  # of messages or of collectives; `interact` draws none if more are visible
