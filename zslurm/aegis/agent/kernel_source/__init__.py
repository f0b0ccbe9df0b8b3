"""Where lines of the kernel log come from: /dev/kmsg, journalctl, or a file."""
