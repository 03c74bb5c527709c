"""Measures how well an audit finds wrong labels, outliers and near-duplicates that were planted."""
