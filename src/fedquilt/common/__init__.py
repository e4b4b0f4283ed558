"""What every part uses: errors, checks of arguments, seeded random numbers."""
