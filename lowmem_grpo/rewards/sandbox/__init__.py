"""Runs Python code that a model wrote, in a process of its own that can do little and ends soon: `trial.run_tests`.

There are two isolations, all with the same limits (`limits.Limits`) and the same filter of system calls:

    bubblewrap   own namespaces: the code sees Python, the C libraries and an empty scratch directory; no network
    process      no namespaces, and only if asked for: `isolation.PROCESS_WARNING` says what this leaves open

Both guarantee the following, also for root. `RLIMIT_NPROC` does not bind root, so a filter of system calls
(seccomp) allows what a computation needs and nothing else: no new process or thread, no signal to another process, no
socket, no ptrace, no other priority, owner or time of a file, and no higher limit.

    one process, no thread, no child that could outlive it     by rlimits: memory, CPU time, size of files, open files
    no socket, hence no network                                by the parent: wall time, output bytes, number of files
    an empty environment, closed standard input, and no descriptors but two output pipes and one socket for answers

A verdict cannot be forged, because the code's process never learns what is expected. For programs with input and
output, and for calls with a result, the parent compares. Asserts run in a second sandboxed process, where the functions
under test are stand-ins that ask the first process. What comes back is plain data (numbers, text, lists, ...), rebuilt
there, or a stand-in for an object, and never the object itself. So exit codes, "passed" on any channel, overridden
builtins, an `__eq__` that always says yes, or a harness read from memory gain nothing: only the right answer passes.

What the sandbox does not prevent: code can recognise the inputs of a row's tests and answer only those; a hole in the
kernel is a hole here; time and caches can be observed. For `process`, read the warning.

A row's tests are trusted. A test that gives the code's result to eval, exec or pickle runs the model's code where the
verdict is made (`assert eval(solve())`). A test that swallows what the code raises (`except Exception: pass`; an
IndexError in its own `__getitem__`, an AttributeError under `hasattr`) passes code that raises. Objects of the code's
classes stay in its process, and `remote` says what a test can do with them and what it cannot believe. A test that
never calls the code is an error and no verdict. Only Python's standard library is available.
"""
