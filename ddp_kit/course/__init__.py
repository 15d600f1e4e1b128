"""What a teacher needs: hand out the course, have it graded, and see who is stuck.

`python -m ddp_kit.course` lists the commands. Each has a function that declares its arguments, and
one that returns the sentence to print or raises CourseError.
"""
