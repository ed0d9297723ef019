"""What chapters 11 to 13 teach, and the small model of all later ones."""
