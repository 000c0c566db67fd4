"""A sandbox for model-written Python code: a separate process with few rights and strict limits. See `trial.run_tests`.

There are two isolations, with the same limits (`limits.Limits`) and the same filter of system calls:

    bubblewrap   own namespaces: the code sees Python, the C libraries and an empty scratch directory; no network
    process      no namespaces, opt-in only: `trial.PROCESS_WARNING` says what this leaves open

Both guarantee the following, even for root. `RLIMIT_NPROC` does not bind root, so a filter of system calls (seccomp)
allows only those that a computation needs: no new process or thread, no signal to another process, no socket, no
ptrace, no change of a priority or of a file's owner or times, and no higher limit.

    rights   one process, no thread, no child that could outlive it; no socket, hence no network; an empty environment;
             closed standard input; no descriptors but two output pipes and one socket for answers
    limits   memory, CPU time, file size, open files (by rlimits); wall time, output, number of files (by the parent)

A verdict cannot be forged, because the code's process never learns the expected result. For programs with input and
output, and for calls with a result, the parent compares. Asserts run in a second sandboxed process, where the functions
under test are stand-ins that send their calls to the first process. Results come back as plain data (numbers, text,
lists, ...), rebuilt in the second process, or as a stand-in for an object, never as the object itself. So exit codes,
"passed" on any channel, overridden builtins, an `__eq__` that always returns True, or a harness read from memory gain
nothing: only the right answer passes.

The sandbox does not prevent code from recognising the inputs of a row's tests and answering only those, from exploiting
a hole in the kernel, or from observing time and caches. For `process`, read the warning too.

A row's tests are trusted. A test that passes the code's result to eval, exec or pickle runs the model's code in the
process that makes the verdict (`assert eval(solve())`). A test that swallows the code's exceptions (`except Exception:
pass`; an IndexError in its own `__getitem__`, an AttributeError under `hasattr`) passes code that raises. Objects of
the code's classes stay in its process; `remote` documents what a test can do with them, and what it must not trust. A
test that never calls the code is an error without a verdict. Only Python's standard library is available.
"""
