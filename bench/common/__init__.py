"""Code that all benches share: rows, targets, the page of results, folders of weights."""
