"""Small faults in the package, one at a time: how many of them does the test suite find?"""
