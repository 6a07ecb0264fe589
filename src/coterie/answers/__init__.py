"""Answers to users' questions about traces and policies, as numbers, figures and pages; one package per command."""
