"""The sources of lines of the kernel log: /dev/kmsg, journalctl, or a file."""
