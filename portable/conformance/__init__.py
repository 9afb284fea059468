"""The contract that every kernel meets, as a kit: its cases, the check, and a report of what a device's kernels do."""
