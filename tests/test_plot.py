"""Pictures: what is drawn, in which colour, and what the text table says."""

import functools
import io
import math
import re
from pathlib import Path

import matplotlib
import matplotlib.style
import pytest
import torch
from IPython.core.pylabtools import print_figure
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle
from PIL import Image

from ddp_kit import plot
from ddp_kit.errors import PlotError
from ddp_kit.plot import (
    attention,
    bandwidth,
    losses,
    memory,
    pipeline,
    placements,
    rank_color,
    ring,
    scaling,
    step_times,
    tensors,
)
from ddp_kit.plot.style import TIMES, luminance, marker, series_color, text_color

NEW, SHARED = "#d0d0d0", "#ffffff"
EQUAL_LOSSES = [[2.3, 1.1, 0.5]] * 4


def t(*numbers):
    return torch.tensor(numbers)


def ring_history(n):
    """Return what each rank holds before and after each step of a ring, by plain sums."""
    held = [[10**rank] * n for rank in range(n)]
    history = [[list(chunks)] for chunks in held]
    for gathering in (False, True):
        for step in range(n - 1):
            before = [list(chunks) for chunks in held]
            for rank in range(n):
                left = (rank - 1) % n
                chunk = (left - step + gathering) % n
                held[rank][chunk] = before[left][chunk] + before[rank][chunk] * (not gathering)
                history[rank].append(list(held[rank]))
    return [torch.tensor(steps) for steps in history]


def one_of_each(n):
    return [
        tensors([{"before": t(10**rank), "after": t(7, 8)} for rank in range(n)]),
        losses([[2.0, 1.0 + rank] for rank in range(n)]),
        ring(ring_history(n)),
        bandwidth({f"way {i}": [(4096, 1e-3 * (i + 1)), (1 << 20, 2e-3)] for i in range(n)}),
        step_times({f"way {i}": [0.010, 0.012 + i, 0.011] for i in range(n)}),
        memory(
            {f"step {i}": [{"parameters": 8_000, "batch": r} for r in range(n)] for i in range(n)}
        ),
        scaling(
            {f"way {i}": [(2, 1e-3 * (i + 1)), (4096, 1.0)] for i in range(n)}, {"x": [(2, 1)]}
        ),
        placements(list(torch.arange(2 * n).view(n, 2).split(1)), torch.arange(2 * n).view(n, 2)),
        attention([[(0, range(r, r + 1), range(r + 1), r + 1)] for r in range(n)]),
        pipeline([[("F", 0, rank, rank + 1), ("B", 0, n, n + 2)] for rank in range(n)]),
    ]


@functools.cache
def drawn():
    """Return the bytes and the text of one of each: drawing them takes seconds."""
    return [(picture._repr_png_(), repr(picture)) for picture in one_of_each(3)]


def texts(picture):
    return [text.get_text() for ax in picture.axes for text in ax.texts]


def legend(ax):
    return [text.get_text().replace("\n", " ") for text in ax.get_legend().get_texts()]


def boxes(picture):
    """Return (text, fill) of every box with a number in it, in drawing order."""
    ax = picture.axes[0]
    fills = {}
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and to_hex(patch.get_facecolor(), True)[-2:] == "ff":
            (x, y), w, h = patch.get_xy(), patch.get_width(), patch.get_height()
            fills[round(x + w / 2, 6), round(y + h / 2, 6)] = to_hex(patch.get_facecolor())
    places = [(text, tuple(round(at, 6) for at in text.get_position())) for text in ax.texts]
    return [(text.get_text(), fills[at]) for text, at in places if at in fills]


def outlines(picture):
    """Return the colours of the outlined cells of a ring, in drawing order; the key's is last."""
    return [
        to_hex(patch.get_edgecolor())
        for patch in picture.axes[0].patches
        if to_hex(patch.get_facecolor(), keep_alpha=True).endswith("00")
    ]


# ---- colours


def test_sixteen_ranks_have_colours_of_their_own_of_which_okabes_and_itos_come_first():
    assert len({rank_color(rank) for rank in range(16)}) == 16
    assert (rank_color(0), rank_color(7)) == ("#0072b2", "#000000")
    assert rank_color(16) == rank_color(0)


@pytest.mark.parametrize("rank", range(16))
def test_text_on_a_rank_colour_has_the_contrast_that_wcag_asks_for(rank):
    low, high = sorted(luminance(c) for c in (rank_color(rank), text_color(rank_color(rank))))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_rank_has_the_same_colour_in_every_picture():
    n = 4
    moved = tensors([{"before": t(rank), "after": t(rank)} for rank in range(n)])
    lines = [line for line in losses(EQUAL_LOSSES).axes[1].lines if line.get_label()[0] == "r"]
    first_step = outlines(ring(ring_history(n)))[:n]
    for rank in range(n):
        assert (str(rank), rank_color(rank)) in boxes(moved)
        assert lines[rank].get_label() == f"rank {rank}"
        assert to_hex(lines[rank].get_color()) == rank_color(rank)
        assert first_step[(rank + 1) % n] == rank_color(rank)


# ---- the figure


def test_picture_has_paper_of_its_own_on_a_dark_page():
    for png, _ in drawn():
        image = Image.open(io.BytesIO(png))
        assert "A" not in image.convert().getbands()
        assert "transparency" not in image.info
        corners = [(0, 0), (image.width - 1, 0), (image.width - 1, image.height - 1)]
        assert {image.convert("RGB").getpixel(corner) for corner in corners} == {(255, 255, 255)}


def test_every_look_at_a_picture_and_ipythons_printer_draw_the_same_bytes():
    picture = losses(EQUAL_LOSSES)
    first = picture._repr_png_()
    assert picture._repr_png_() == print_figure(picture, fmt="png") == first
    assert repr(picture) == str(picture) == picture.text_table


def test_same_data_gives_the_same_bytes_and_text_in_a_dark_style_too_and_rcparams_stay():
    with matplotlib.rc_context():
        matplotlib.style.use(["ggplot", "dark_background"])
        before = dict(matplotlib.rcParams)
        dark = [(picture._repr_png_(), repr(picture)) for picture in one_of_each(3)]
        assert dict(matplotlib.rcParams) == before
    assert dark == drawn()


def test_plot_imports_no_pyplot():
    for path in Path(plot.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(from|import) .*pyplot", path.read_text("utf-8"), re.MULTILINE)


def test_title_replaces_the_default_and_may_be_empty():
    picture = tensors([{"before": t(1)}], title="A broadcast")
    assert "A broadcast" in texts(picture)
    assert repr(picture).startswith("A broadcast\n")
    assert not any("What each rank holds" in text for text in texts(picture))
    for picture in (tensors([{"before": t(1)}], title=""), ring(ring_history(2), title="")):
        assert picture._repr_png_()


@pytest.mark.parametrize(
    "draw", [getattr(plot, name) for name in plot.__all__ if name not in ("Picture", "rank_color")]
)
def test_input_of_the_wrong_type_is_a_plot_error(draw):
    given = (7, 0) if draw in (plot.ring_step, plot.placements) else (7,)
    with pytest.raises(PlotError, match=r"(needs|must map) .* got (7|int)") as caught:
        draw(*given)
    for former in (ValueError, TypeError):  # what these functions raised before
        assert isinstance(caught.value, former)


# ---- tensors


def test_moved_number_keeps_the_colour_of_its_rank():
    picture = tensors([{"in": t(5), "out": t(6)}, {"in": t(6), "out": t(5)}])
    assert boxes(picture) == [
        ("5", rank_color(0)),
        ("6", rank_color(1)),
        ("6", rank_color(1)),
        ("5", rank_color(0)),
    ]


def test_new_number_is_grey_and_bold_and_a_shared_one_white():
    picture = tensors(
        [
            {"before": t(1.0, 0.0), "after": t(3.0, 0.0)},
            {"before": t(2.0, 0.0), "after": t(3.0, 2.0)},
        ]
    )
    assert [fill for text, fill in boxes(picture) if text == "3"] == [NEW, NEW]
    assert [fill for text, fill in boxes(picture) if text == "0"] == [SHARED] * 3
    weights = {text.get_text(): text.get_weight() for text in picture.axes[0].texts}
    assert weights["3"] == "bold"
    assert weights["0"] == weights["2"] == "normal"


def test_none_is_a_dashed_box_without_a_colour():
    picture = tensors([{"before": t(1), "after": None}, {"before": None, "after": t(1)}])
    dashed = [p for p in picture.axes[0].patches if p.get_linestyle() not in ("solid", "-")]
    assert len(dashed) == 2
    assert {to_hex(p.get_facecolor()) for p in dashed} == {SHARED}
    assert texts(picture).count("\N{EN DASH}") == 2
    assert "Dashed: nothing here." in " ".join(texts(picture))


def test_scalars_matrices_and_empty_tensors_have_a_table():
    stages = {"a": torch.tensor(3.0), "b": t(1, 2).view(2, 1), "c": torch.zeros(0), "d": [t(1)] * 2}
    row = repr(tensors([stages])).split("\n")[2]
    assert row == "rank 0  3  1; 2  []  1 | 1"


def test_stages_may_come_in_another_order():
    picture = tensors([{"x": t(1), "y": t(2)}, {"y": t(4), "x": t(3)}])
    assert repr(picture).split("\n")[1:] == ["        x  y", "rank 0  1  2", "rank 1  3  4"]


def test_long_tensor_is_shown_without_its_middle_and_the_caption_says_so():
    picture = tensors([{"before": torch.arange(100), "after": torch.arange(12.0).view(6, 2)}])
    assert [text for text, _ in boxes(picture)][:7] == ["0", "1", "2", "3", "97", "98", "99"]
    row = repr(picture).split("\n")[2]
    assert row == "rank 0  0 1 2 3 … 97 98 99  0 1; 2 3; … …; 10 11"
    assert "The middle of longer rows is left out" in " ".join(texts(picture))
    whole = tensors([{"before": torch.arange(8), "after": torch.arange(8)}] * 8)
    assert len(boxes(whole)) == 128


def test_number_from_a_part_that_is_left_out_is_not_called_new():
    picture = tensors([{"before": torch.arange(100).view(50, 2), "after": t(50)}])
    assert boxes(picture)[-1] == ("50", rank_color(0))


def test_holders_that_are_no_ranks_are_named_in_chip_caption_and_table():
    picture = tensors([{"in": t(1), "out": t(3)}, {"in": t(2), "out": None}], name="device")
    assert repr(picture).split("\n") == [
        "What each device holds: in → out",
        "          in  out",
        "device 0  1   3",
        "device 1  2   \N{EN DASH}",
    ]
    assert "device 1" in texts(picture)
    assert "the one device that held this number" in " ".join(texts(picture))
    assert "rank" not in " ".join(texts(picture))


# ---- placements

WHOLE = torch.arange(1.0, 9).view(4, 2)


def test_parts_are_found_by_value_and_equal_ones_have_one_colour():
    held = [WHOLE[:2], WHOLE[:2], WHOLE[2:], WHOLE[2:]]
    picture = placements(held, WHOLE, mesh=(2, 2), names=("dp", "tp"), title="[Shard, Replicate]")
    assert repr(picture) == (
        "[Shard, Replicate]\n"
        "        holds\n"
        "rank 0  [0:2, :] = 1 2; 3 4\n"
        "rank 1  [0:2, :] = 1 2; 3 4\n"
        "rank 2  [2:4, :] = 5 6; 7 8\n"
        "rank 3  [2:4, :] = 5 6; 7 8"
    )
    colors = [color for _, color in boxes(picture)]
    assert colors == [rank_color(0)] * 8 + [rank_color(2)] * 8
    assert {"tp \N{RIGHTWARDS ARROW}", "\N{LEFTWARDS ARROW} dp"} <= {
        text.strip() for text in texts(picture)
    }


def test_partial_sums_wholes_and_nothing_are_told_apart():
    stages = [
        {"a": WHOLE / 2, "b": WHOLE, "c": WHOLE[:, :0]},
        {"a": WHOLE / 2, "b": WHOLE, "c": WHOLE[1:2, 1:]},
    ]
    lines = repr(placements(stages, WHOLE)).split("\n")
    half = "a partial sum = 0.5 1; 1.5 2; 2.5 3; 3.5 4"
    assert lines[1:] == [
        "        a                                           b                         c",
        f"rank 0  {half}  all = 1 2; 3 4; 5 6; 7 8  nothing",
        f"rank 1  {half}  all = 1 2; 3 4; 5 6; 7 8  [1:2, 1:2] = 4",
    ]
    caption = " ".join(texts(placements(stages, WHOLE)))
    assert "Pale: a partial sum" in caption
    assert "Dashed: the rest of the tensor" in caption
    assert "Dashed" not in " ".join(texts(placements([WHOLE], WHOLE)))


def test_the_colours_after_a_change_name_the_rank_that_held_a_number_before():
    stages = [{"rows": row, "columns": WHOLE[:2, r : r + 1]} for r, row in enumerate(WHOLE[:2])]
    drawn = boxes(placements(stages, WHOLE[:2]))
    by_origin = {"1": 0, "2": 0, "3": 1, "4": 1}
    assert [text for text, _ in drawn] == ["1", "2", "3", "4", "1", "3", "2", "4"]
    assert [color for _, color in drawn] == [rank_color(by_origin[text]) for text, _ in drawn]


def test_sums_are_grey_and_what_several_ranks_held_is_white():
    whole = t(11, 12, 7)
    stages = [{"a": whole / 2, "b": whole[:2]}, {"a": whole / 2, "b": whole[2:]}]
    picture = placements(stages, whole)
    assert [color for _, color in boxes(picture)[6:]] == [NEW] * 3
    assert "Grey and bold: a new number, held by no rank at “a”." in " ".join(texts(picture))
    stages = [{"a": whole, "b": whole[:2]}, {"a": whole, "b": whole[2:]}]
    picture = placements(stages, whole)
    assert {color for _, color in boxes(picture)} == {SHARED}
    assert "White: held by several ranks at “a”." in " ".join(texts(picture))


def test_a_vector_has_one_index():
    picture = placements([t(1, 2), t(3)], t(1, 2, 3))
    assert repr(picture).split("\n")[2:] == ["rank 0  [0:2] = 1 2", "rank 1  [2:3] = 3"]


@pytest.mark.parametrize(
    ("held", "more", "message"),
    [
        ([], {}, "the result is empty"),
        ([t(7, 8)], {}, r"rank 0 holds a tensor of shape \(1, 2\) that is in no place"),
        ([t(1)], {"whole": t(1, 1)}, "that is in 2 places of the whole"),
        ([t(1)], {"whole": torch.zeros(9, 1)}, "at most 8 rows and columns can be drawn, got"),
        ([t(1)], {"whole": torch.zeros(2, 2, 2)}, "the whole tensor must be a tensor of at most"),
        ([t(1)], {"mesh": (2, 2)}, r"mesh must have a place for each of 1 rank .* got \(2, 2\)"),
        ([{"a": t(1)}, {"b": t(1)}], {}, "every rank must have the same stages"),
        (["one"], {}, "what rank 0 holds must be a tensor of at most two dimensions, got 'one'"),
    ],
)
def test_placements_say_what_they_cannot_draw(held, more, message):
    with pytest.raises(PlotError, match=message):
        placements(held, **{"whole": t(1, 2, 3), **more})


# ---- losses


def test_losses_that_cannot_be_drawn_are_named_below():
    picture = losses([[2.0, float("nan"), 1.0], [2.0, 1.0, float("inf")], [2.0, 1.0, 0.5]])
    shown = [text.get_text() for text in picture.axes[0].texts]
    assert "Rank 0: nan in epoch 2. Rank 1: inf in epoch 3." in shown
    assert not any("Rank 2" in text for text in shown)


def test_losses_table_has_two_decimals():
    assert repr(losses([[2.345, 1.0, 0.5], t(2.3, 0.449)], xlabel="step")) == (
        "Training loss of each rank, step by step\n"
        "        first step  last step\n"
        "rank 0        2.35       0.50\n"
        "rank 1        2.30       0.45"
    )


def test_losses_of_settings_have_names_and_no_colour_of_a_rank():
    compared = {"1 rank": [2.3, 1.0], "4 ranks, learning rate 0.3": [2.3, float("nan")]}
    picture = losses(compared, xlabel="step")
    assert repr(picture) == (
        "Training loss, step by step\n"
        "                            first step  last step\n"
        "1 rank                            2.30       1.00\n"
        "4 ranks, learning rate 0.3        2.30        nan"
    )
    ax = picture.axes[1]
    assert legend(ax) == list(compared)
    lines = [line for line in ax.lines if line.get_label() in compared]
    assert [to_hex(line.get_color()) for line in lines] == [series_color(0), series_color(1)]
    assert "4 ranks, learning rate 0.3: nan in step 2." in texts(picture)


def test_lines_that_coincide_have_markers_and_dashes_of_their_own_and_others_are_solid():
    def looks(held):
        lines = [ln for ln in losses(held).axes[1].lines if ln.get_label().startswith("rank")]
        return [(line.get_marker(), line.get_linestyle()) for line in lines]

    together = looks(EQUAL_LOSSES)
    assert len({marker for marker, _ in together}) == 4
    assert [style for _, style in together] == ["-", "--", "--", "--"]
    assert [style for _, style in looks([[1.0, 2.0], [1.1, 3.0]])] == ["-", "-"]


def test_losses_are_drawn_over_epochs_that_count_from_one():
    ax = losses([[2.3, 1.1, 0.5]], xlabel="step", ylabel="loss").axes[1]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss")
    assert list(ax.lines[0].get_xdata()) == [1, 2, 3]
    assert list(ax.lines[0].get_ydata()) == [2.3, 1.1, 0.5]


# ---- ring


def test_changed_cells_wear_the_colour_of_the_left_neighbour_and_an_arrow_leads_to_each():
    n = 4
    picture = ring(ring_history(n))
    one_step = [rank_color((rank - 1) % n) for rank in range(n)]
    assert outlines(picture) == one_step * (2 * (n - 1)) + [rank_color(0)]
    arrows = [p for p in picture.axes[0].patches if isinstance(p, FancyArrowPatch)]
    assert len(arrows) == n * 2 * (n - 1)


def test_cells_darken_and_the_complete_sum_stands_out():
    fills = dict(boxes(ring(ring_history(4))))
    shades = [luminance(fills[number]) for number in ("1", "11", "111", "1111")]
    assert shades == sorted(set(shades), reverse=True)
    assert fills["1"] == fills["1000"]
    assert fills["1101"] == fills["1011"]
    assert fills["1111"] == "#3d2a6b"


def test_ring_that_is_not_complete_does_not_claim_it():
    history = ring_history(3)
    history[1][-1, 0] = 11
    assert repr(ring(history)).startswith("Ring all-reduce on 3 ranks, step by step\n")


def test_ring_of_one_is_one_panel():
    picture = ring([torch.tensor([[1]])])
    assert repr(picture).split("\n")[1:] == ["       rank 0", "start  1"]
    assert outlines(picture) == []


# ---- bandwidth

SERIES = {
    "built-in": [(1_000_000, 0.002), (4096, 0.0001234)],
    "by hand": [(4096, 0.0002468), (1_000_000, 0.006), (100_000_000, 1.2345)],
}


def test_bandwidth_table_has_three_digits_and_exact_sizes():
    assert repr(bandwidth(SERIES)) == (
        "Time of one call by tensor size (ms)\n"
        "bytes        built-in  by hand\n"
        "4,096           0.123    0.247\n"
        "1,000,000        2.00     6.00\n"
        "100,000,000         \N{EN DASH}     1230"
    )


def test_bandwidth_is_logarithmic_in_milliseconds_with_units():
    _, above, below = bandwidth(SERIES).axes
    assert (above.get_xscale(), above.get_yscale()) == ("log", "log")
    assert list(above.lines[0].get_xdata()) == [4096, 1_000_000]
    assert list(above.lines[0].get_ydata()) == pytest.approx([0.1234, 2])
    assert (above.get_ylabel(), below.get_xlabel()) == ("time (ms)", "size of the tensor")
    assert legend(above) == ["built-in", "by hand"]
    alone = bandwidth({"built-in": SERIES["built-in"]})
    assert [ax.get_xlabel() for ax in alone.axes[1:]] == ["size of the tensor"]


def test_sizes_and_amounts_have_three_digits_in_a_picture():
    below = bandwidth({"gloo": [(256_000, 1e-3), (64_000_000, 2e-3)]}).axes[-1]
    assert [label.get_text() for label in below.get_xticklabels()] == ["256 kB", "64 MB"]
    bars = memory({"gather": [{"batch": 764_240}], "loss": [{"batch": 765_440}]}).axes[1]
    assert [text.get_text() for text in bars.texts] == ["764 kB", "765 kB"]


def test_second_panel_is_the_ratio_to_the_first_series():
    below = bandwidth(SERIES).axes[2]
    one, ratio = below.lines
    assert list(one.get_ydata()) == [1, 1]
    assert list(ratio.get_xdata()) == [4096, 1_000_000]
    assert list(ratio.get_ydata()) == pytest.approx([2, 3])
    assert below.get_ylabel() == f"{TIMES} built-in"


def test_series_that_are_left_out_do_not_change_the_colours_of_the_others():
    series = {name: [(1, 1.0), (2, 2.0)] for name in ("built-in", "ring", "tree")}
    picture = bandwidth(series, only=["tree", "ring"])
    assert repr(picture).splitlines()[1] == "bytes  ring  tree"
    _, above, below = picture.axes
    looks = [(to_hex(line.get_color()), line.get_marker()) for line in above.lines]
    assert looks == [(series_color(i), marker(i)) for i in (1, 2)]
    assert below.get_ylabel() == f"{TIMES} ring"
    assert [to_hex(line.get_color()) for line in below.lines] == [series_color(1), series_color(2)]
    for only in ([], ["tree", "bush"]):
        with pytest.raises(PlotError, match=r"only must have names .* \(built-in, ring, tree\)"):
            bandwidth(series, only=only)


def test_samples_are_drawn_by_their_median_and_quartiles_and_a_model_dashed():
    samples = {"built-in": [(1000, [0.001, 0.002, 0.009, 0.003, 0.004]), (2000, [0.005] * 3)]}
    picture = bandwidth(samples, model={"built-in": [(500, 0.0015), (1000, 0.002), (4000, 0.02)]})
    assert repr(picture) == (
        "Time of one call by tensor size (ms)\n"
        "bytes  built-in  built-in, model\n"
        "1,000      3.00             2.00\n"
        "2,000      5.00                \N{EN DASH}"
    )
    line, *spreads, model = picture.axes[1].lines
    assert list(line.get_ydata()) == pytest.approx([3, 5])
    assert [bar.get_ydata() for bar in spreads] == [pytest.approx([2, 4]), pytest.approx([5, 5])]
    assert model.get_linestyle() == "--"
    assert list(model.get_xdata()) == [500, 1000, 4000]
    assert {to_hex(each.get_color()) for each in (*spreads, model)} == {series_color(0)}
    said = "Thin bar: from the first to the third quartile. Dashed: the model."
    assert said in " ".join(texts(picture))
    assert len(bandwidth(SERIES).axes[1].lines) == len(SERIES)


def test_dashed_series_have_other_colours_than_those_they_share():
    series = {name: [(4, 1e-3), (8, 2e-3)] for name in ("gloo, 2", "mpi, 2", "gloo, 4", "mpi, 4")}
    dashed = {"gloo, 4": "gloo, 2", "mpi, 4": "mpi, 2"}
    model = {name: [(4, 0.5e-3), (8, 4e-3)] for name in series}
    picture = bandwidth(series, dashed=dashed, model=model, residuals=True)
    _, above, below = picture.axes
    looks = [(to_hex(each.get_color()), each.get_linestyle()) for each in above.lines]
    assert looks[::2] == [
        (series_color(i), style) for i, style in ((0, "-"), (1, "-"), (0, "--"), (1, "--"))
    ]
    assert [color for color, _ in looks[1::2]] == [series_color(i) for i in (0, 1, 0, 1)]
    assert "Dotted: the model." in " ".join(texts(picture))
    one, *residuals = below.lines
    assert list(one.get_ydata()) == [1, 1]
    assert [list(each.get_ydata()) for each in residuals] == [pytest.approx([2, 0.5])] * 4
    assert below.get_ylabel() == f"{TIMES} the model"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dashed": {"by hand": "slow"}}, "dashed must map names of series (built-in, by hand) to"),
        ({"residuals": True}, "residuals need a model of each series that is drawn, at each size"),
        ({"model": {"tree": [(1, 1.0)]}}, "model has 'tree', but the series are built-in, by hand"),
    ],
)
def test_bandwidth_says_what_is_wrong_with_its_options(given, message):
    with pytest.raises(PlotError, match=re.escape(message)):
        bandwidth(SERIES, **given)


# ---- scaling

PREDICTED = {"ring": [(2, 0.001), (1024, 0.5)], "tree": [(2, 0.004), (1024, 0.04)]}
MEASURED = {"tree": [(4, 0.02), (2, 0.005)]}
PUBLISHED = {"Somebody 2018": [(256, 0.25)]}


def test_scaling_table_separates_prediction_measurement_and_publication():
    table = repr(scaling(PREDICTED, MEASURED, PUBLISHED)).replace("\N{EN DASH}", "-")
    assert table == (
        "Time by number of ranks (ms)\n"
        "ranks  ring  tree  tree, measured  Somebody 2018, published\n"
        "2      1.00  4.00            5.00                         -\n"
        "4         -     -            20.0                         -\n"
        "256       -     -               -                       250\n"
        "1,024   500  40.0               -                         -"
    )


def test_prediction_is_a_line_measurement_a_filled_mark_publication_a_hollow_one():
    ax = scaling(PREDICTED, MEASURED, PUBLISHED).axes[1]
    ring_line, tree_line, measured, published = (line for line in ax.lines if len(line.get_xdata()))
    for line in (ring_line, tree_line):
        assert (line.get_linestyle(), line.get_marker()) == ("-", "None")
    for marks in (measured, published):
        assert marks.get_linestyle() == "None"
    assert measured.get_marker() != "None"
    assert to_hex(measured.get_markerfacecolor()) == to_hex(tree_line.get_color())
    assert to_hex(tree_line.get_color()) != to_hex(ring_line.get_color())
    assert to_hex(published.get_markerfacecolor()) == "#ffffff"
    assert to_hex(published.get_markeredgecolor()) != "#ffffff"
    assert list(measured.get_xdata()) == [2, 4]
    assert list(measured.get_ydata()) == pytest.approx([5, 20])


def test_a_publication_about_a_line_has_its_colour_and_others_have_none():
    papers = {"tree, by somebody": [(256, 0.25)], "Somebody 2018": [(256, 0.2)]}
    ring_line, tree_line, about_tree, other = scaling(PREDICTED, None, papers).axes[1].lines
    assert to_hex(about_tree.get_markeredgecolor()) == to_hex(tree_line.get_color())
    lines = {to_hex(line.get_color()) for line in (ring_line, tree_line)}
    assert to_hex(other.get_markeredgecolor()) not in lines


def test_pictures_with_one_order_give_a_name_one_colour():
    tree = {"tree": PREDICTED["tree"]}
    both = scaling(PREDICTED, order=["ring", "tree"]).axes[1].lines[1]
    alone = scaling(tree, order=["ring", "tree"]).axes[1].lines[0]
    assert to_hex(alone.get_color()) == to_hex(both.get_color())
    assert to_hex(scaling(tree).axes[1].lines[0].get_color()) != to_hex(both.get_color())


def test_the_key_says_which_is_which_and_leaves_out_what_is_not_drawn():
    whole = legend(scaling(PREDICTED, MEASURED, PUBLISHED).axes[1])
    published = "published, hollow: Somebody 2018"
    assert whole == ["ring", "tree", "measured here: filled", published]
    assert legend(scaling(PREDICTED).axes[1]) == ["ring", "tree"]


def test_scaling_is_logarithmic_but_an_efficiency_is_a_share_of_100():
    ax = scaling(PREDICTED).axes[1]
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_ylabel()) == ("log", "log", "time (ms)")
    shares = {"ring": [(2, 1.0), (4096, 0.25)]}
    ax = scaling(shares, efficiency=True).axes[1]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")
    assert ax.get_ylabel() == "efficiency (%)"
    assert list(ax.lines[0].get_ydata()) == [100, 25]


# ---- step times

STEP_TIMES = {"DDP": [0.010, 0.030, 0.012], "by hand": [0.0205]}


def test_step_times_table_is_the_median():
    assert repr(step_times(STEP_TIMES)) == (
        "Time of one step\n         median (ms)\nDDP             12.0\nby hand         20.5"
    )


def test_bars_end_at_the_median_and_lines_at_the_quartiles():
    picture = step_times(STEP_TIMES)
    ax = picture.axes[1]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([12, 20.5])
    assert ax.collections[0].get_segments()[0][:, 0] == pytest.approx([11, 21])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["DDP", "by hand"]
    assert ax.get_xlabel() == "time of one step (ms)"


# ---- memory

HELD = {
    "scatter": [{"batch": 4000, "shard": 0, "nothing": 0}, {"shard": 1500}],
    "parallel apply": [{"batch": 4000, "kept": 500}, {"shard": 1500, "kept": 2500}],
}


def test_bars_of_a_device_are_stacked_on_the_scale_of_all():
    _, first, second = memory(HELD).axes
    bars = [(b.get_x() + b.get_width() / 2, b.get_y(), b.get_height()) for b in first.patches]
    assert bars == [(0, 0, 4000), (1, 0, 4000), (1, 4000, 500)]
    bars = [(b.get_x() + b.get_width() / 2, b.get_y(), b.get_height()) for b in second.patches]
    assert bars == [(0, 0, 1500), (1, 0, 1500), (1, 1500, 2500)]
    assert first.get_ylim() == second.get_ylim()
    assert [text.get_text() for text in second.texts] == ["1.5 kB", "4 kB"]


def test_known_kinds_look_the_same_whatever_stands_beside_them():
    def looks(*kinds):
        bars = memory({"a": [dict.fromkeys(kinds, 1)]}).axes[1].patches
        found = [(to_hex(bar.get_facecolor()), bool(bar.get_hatch())) for bar in bars]
        assert len(set(found)) == len(kinds)
        return dict(zip(kinds, found, strict=True))

    known = "parameters", "gathered parameters", "gradients", "optimizer states", "activations"
    alone = looks(*known)
    beside = looks("batch", "shard", *reversed(known), "optimizer", "x", "y", "z", "last")
    assert {kind: beside[kind] for kind in known} == alone
    few = looks("parameters", "gradients", "activations")
    assert few == {kind: alone[kind] for kind in few}
    fill = beside["batch"][0]
    assert (beside["batch"], beside["shard"]) == ((fill, False), (fill, True))


def test_a_kind_named_after_a_known_one_has_its_hue_and_others_have_none_of_theirs():
    def fill(kind, *others):
        bar = memory({"a": [dict.fromkeys((kind, *others), 1)]}).axes[1].patches[0]
        return to_hex(bar.get_facecolor())

    for known in ("parameters", "gradients"):
        assert fill(f"all_gather of {known}", "batch") == fill(known)
        assert fill(f"all_gather of {known}", known) == fill(known)
    known = "parameters", "gradients", "optimizer states", "activations"
    assert len({*map(fill, known)}) == 4
    assert not {fill(kind) for kind in known} & {fill(kind, "batch") for kind in ("tokens", "x")}


def test_devices_that_hold_nothing_at_all_are_drawn():
    last = repr(memory({"end": [{"batch": 0}, {}]})).split("\n")[2:]
    assert last == ["end       0       0", "end       1       0"]


def test_memory_of_ranks_speaks_of_ranks_and_counts_tokens():
    picture = memory({"a step": [{"received": 1200}] * 2}, name="rank", unit="tokens")
    assert repr(picture).splitlines()[:2] == [
        "What each rank holds after each step (tokens)",
        "        rank  received  in all",
    ]
    assert {"rank 0", "rank 1"} <= set(texts(picture))
    assert "device" not in " ".join(texts(picture))
    assert [text.get_text() for text in picture.axes[1].texts] == ["1,200"]


CAUSAL = [
    [(0, range(0, 4), range(0, 4), 16)],
    [(0, range(4, 6), range(4, 6), 4), (1, range(4, 6), range(0, 4), 8)],
]


def test_a_score_has_the_colour_of_the_rank_that_computes_it_and_a_step_lasts_as_long_as_any():
    _, matrix, work = attention(CAUSAL).axes
    drawn = [
        (to_hex(bars.get_facecolor()[0]), bars.get_paths()[0].get_extents().bounds)
        for bars in matrix.collections
    ]
    assert drawn == [
        (rank_color(0), (0, 0, 4, 4)),
        (rank_color(1), (4, 4, 2, 2)),
        (rank_color(1), (0, 4, 4, 2)),
    ]
    ends = [bars.get_paths()[0].get_extents().x1 for bars in work.collections]
    assert ends == [16, 16, 16, 4, 24, 16, 24, 24]


def test_attention_says_what_is_masked_and_who_waits_only_if_it_is_so():
    def caption(*ranks):
        sheet = attention(ranks).axes[0]
        return " ".join(text.get_text() for text in sheet.texts)

    everything = [(0, range(0, 4), range(0, 4), 16), (1, range(0, 4), range(4, 8), 16)]
    for words in ("Pale: computed, but masked", "Grey: a rank waits"):
        assert words in caption(*CAUSAL)
        assert words not in caption(everything, everything)
    assert "Dashed: all ranks are done." in caption(everything, everything)


# ---- pipeline

CELLS = [
    [("F", 0, 10.0, 10.5), ("F", 1, 10.5, 11.0), ("B", 0, 12.5, 13.5), ("B", 1, 14.0, 15.0)],
    [("F", 0, 10.5, 11.0), ("B", 0, 11.0, 12.0), ("F", 1, 12.0, 12.5), ("B", 1, 12.5, 13.5)],
]


def cells_of(picture):
    """Return (x, width, fill) of each cell."""
    drawn = []
    for bars in picture.axes[1].collections:
        (path,) = bars.get_paths()
        x, width = path.get_extents().x0, path.get_extents().width
        drawn.append((float(x), float(width), to_hex(bars.get_facecolor()[0])))
    return drawn


def test_cells_begin_and_end_where_they_were_measured():
    picture = pipeline(CELLS, unit="ms")
    wide = [(x, width) for x, width, _ in cells_of(picture)]
    assert wide == [(0, 0.5), (0.5, 0.5), (2.5, 1), (4, 1), (0.5, 0.5), (1, 1), (2, 0.5), (2.5, 1)]
    assert [text.get_text() for text in picture.axes[1].texts] == [*"0101", *"0011"]
    assert picture.axes[1].get_xlabel() == "time (ms)"
    assert picture.axes[1].get_xlim() == (0, 5)
    said = " ".join(texts(picture))
    assert "Blank is the bubble, here 40.0 % of the time" in said  # 6 of 10 are busy
    longer = pipeline(CELLS, until=20)
    assert longer.axes[1].get_xlim() == (0, 20)
    assert "Blank until the last box ends is the bubble, here 40.0 %" in " ".join(texts(longer))


def test_stages_of_a_rank_are_named_and_later_ones_are_lower_and_paler():
    cells = [[("F", 0, 0, 1, 0), ("F", 0, 1, 2, 2)], [("F", 0, 1, 2, 1), ("I", 0, 2, 3, 1)], []]
    picture = pipeline(cells)
    assert repr(picture).split("\n")[1:] == [
        "        stage, kind and micro-batch",
        "rank 0  0F0 2F0",
        "rank 1  1F0 1I0",
        "rank 2  nothing",
    ]
    tall, low, *_ = (bars.get_paths()[0].get_extents() for bars in picture.axes[1].collections)
    assert tall.height > low.height
    assert {"stages 0, 2", "stage 1"} <= set(texts(picture))
    first, later, other, half = (fill for *_, fill in cells_of(picture))
    assert first == other
    assert luminance(later) > luminance(first)
    assert half not in (first, later)
    key = {text for text in texts(picture) if "ward" in text}
    assert key == {"forward", "backward of the input"}


# ---- all pictures


def test_ranks_and_devices_alone_wear_the_colours_of_ranks():
    held = memory(HELD)
    series = bandwidth({str(i): [(1, 1.0), (2, 2.0)] for i in range(6)}).axes[1].lines
    fills = [
        {to_hex(patch.get_facecolor()) for patch in held.axes[1].patches},
        {fill for *_, fill in cells_of(pipeline(CELLS))},
    ]
    assert [len(each) for each in fills] == [2, 2]
    lines = {to_hex(line.get_color()) for line in series}
    assert lines == {series_color(i) for i in range(6)}
    ranks = {rank_color(rank) for rank in range(16)}
    assert not ranks & lines
    for each in fills:
        assert not each & (lines | ranks)
    chips = [to_hex(patch.get_facecolor()) for patch in held.axes[0].patches]
    assert chips == [rank_color(0), rank_color(1)]


@pytest.mark.parametrize(
    ("draw", "given", "message"),
    [
        (rank_color, -1, "rank must be at least 0, got -1"),
        (tensors, [], "the result is empty"),
        (tensors, [{"a": t(1)}, t(7)], r"rank 1 must return a dict .* got tensor\(\[7\]\)"),
        (tensors, [{"a": t(1)}, {"b": t(1)}], r"rank 0 has \['a'\], rank 1 has \['b'\]"),
        (tensors, [{"a": torch.zeros(2, 3, 4)}], "'a' of rank 0 must be a tensor of at most two"),
        (losses, [[1.0], []], r"rank 1 must return a sequence of losses, got \[\]"),
        (
            ring,
            [torch.ones(3, 2), torch.ones(2, 2)],
            r"rank 1 .* \(3, 2\) on 2 ranks, got shape \(2, 2\)",
        ),
        (ring, [None] * 7, "a ring can be drawn for at most 6 ranks, got 7"),
        (bandwidth, {"a": []}, "'a' must have pairs with a positive number of bytes"),
        (bandwidth, {"a": [(0, 1.0)]}, "'a' must have pairs with a positive number of bytes"),
        (bandwidth, {"a": [(4, 0.0)]}, "'a' has for 4 bytes 0.0: must be a positive"),
        (bandwidth, {"a": [(4, 1.0), (4, 2.0)]}, "'a' has 4 bytes twice"),
        (bandwidth, {"a": 5}, r"'a' must have pairs \(bytes, number\), got 5"),
        (scaling, {}, "predicted is empty"),
        (step_times, {"DDP": [-1.0]}, "'DDP' has -1.0: must be a positive and finite number"),
        (memory, {}, "held is empty"),
        (memory, {"a": [dict.fromkeys(range(13), 1)]}, "from 1 to 12 kinds can be drawn, got 13"),
        (memory, {"a": [{"x": 1}], "b": [{"x": 1}, {}]}, r"the same devices, got \[1, 2\] of them"),
        (memory, {"a": [{"x": 1}, {"x": -2}]}, "'x' of device 1 after 'a' has -2 bytes"),
        (attention, [], "there is no rank to draw"),
        (attention, [CAUSAL[0], 3], "rank 1 must list .step, queries, keys, pairs. .* got 3"),
        (pipeline, [[], []], "no rank has a cell: there is nothing to draw"),
        (pipeline, [[("G", 0, 0, 1)]], r"with the kind .*, got \('G', 0, 0, 1\)"),
        (pipeline, [[("F", 0, 0, math.inf)]], "must be finite numbers, got"),
    ],
)
def test_a_picture_says_what_it_cannot_draw(draw, given, message):
    with pytest.raises(PlotError, match=message):
        draw(given)
