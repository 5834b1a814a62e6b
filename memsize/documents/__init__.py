"""Every answer as a document of typed sections."""
