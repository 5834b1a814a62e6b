"""What is measured or concluded, as frozen records. Nothing here needs torch."""
