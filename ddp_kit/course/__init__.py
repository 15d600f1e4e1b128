"""What a teacher needs: hand out the course, have it graded, and see who is stuck.

`python -m ddp_kit.course` lists the commands. Each is a module with `add_arguments(parser)` and
`run(arguments)`, which returns the sentence to print or raises CourseError.
"""
