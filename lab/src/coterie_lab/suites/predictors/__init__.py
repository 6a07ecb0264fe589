"""Predictors against what requests then did."""
