"""Vision towers: from pixels to the rows that stand for images in a prompt."""
