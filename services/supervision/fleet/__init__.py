"""The engines that run on this machine: which models are loaded, and what memory each may take."""
