"""What traces and policies are worth, as numbers, figures and pages: one suite per question."""
