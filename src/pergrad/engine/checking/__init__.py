"""Checks recorded gradients against plain autograd and explains how they were computed."""
