"""A sandbox for model-written Python code: a separate process with few rights and strict limits. See `trial.run_tests`.

    bubblewrap   own namespaces: the code sees Python, the C libraries and an empty scratch directory
    process      no namespaces, opt-in only: `trial.PROCESS_WARNING` says what this leaves open

Both guarantee the following, even for root:

    rights   one process, one thread, no network, an empty environment, closed standard input, no descriptors but two
             output pipes and one socket for answers; only system calls that a computation needs (`rights`)
    limits   memory, CPU time, file size, open files (by rlimits); wall time, output, number of files (by the parent)

A verdict cannot be forged, because the code's process never learns the expected result. For programs and for calls with
a result, the parent compares. Asserts run in a second sandboxed process, where stand-ins for the tested functions send
calls to the first process. Results come back as plain data or as a stand-in for an object, never as the object itself.
So exit codes, printed text, overridden builtins and an `__eq__` that always returns True gain nothing.

The sandbox does not prevent code from recognising the inputs of tests and answering only those, from exploiting a hole
in the kernel, or from observing time and caches.

Tests are trusted. A test that passes the code's result to eval, exec or pickle (`assert eval(solve())`) runs the
model's code in the process that makes the verdict. A test that swallows the code's exceptions passes code that raises.
Only Python's standard library is available.
"""
