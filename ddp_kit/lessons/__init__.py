"""The lessons, one module each; `main()` of each runs it and proves what it claims."""
