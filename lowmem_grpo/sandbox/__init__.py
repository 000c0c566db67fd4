"""Runs Python that a model wrote, in a process of its own that can do little and ends soon: `trial.run_tests`.

Three isolations, all with the same limits (`limits.Limits`) and the same filter of system calls:

    bubblewrap   own namespaces: sees Python, the C libraries and an empty scratch directory in memory, no network
    nsjail       the same through nsjail
    process      no namespaces, only after an explicit opt-in: see `isolation.PROCESS_WARNING` for what that leaves open

What holds in all three, as root too (`RLIMIT_NPROC` does not bind root, so a filter of system calls, seccomp, refuses
new processes and threads; it also refuses signals to others, sockets, ptrace, io_uring, and raising one's limits):

    one process, no thread, no child that could outlive it     memory, CPU time, size of files and open files by rlimits
    no socket, hence no network                                wall time, bytes of output, number of files by the parent
    an empty environment, standard input closed, no descriptor but two output pipes and one socket for answers

Why a verdict cannot be forged: the code's process never gets to know what is expected. For stdin/stdout pairs and for
calls with a result the parent compares; asserts run in a second sandboxed process, where the functions under test are
stubs that ask the first one, and what comes back is plain data (numbers, text, lists, ...), rebuilt there, never an
object of the code's making. So exit codes, "passed" on any channel, overridden builtins, `__eq__` that says yes and a
harness read from memory gain nothing: the only way to the right answer is to give it.

What does not hold: code can recognise the inputs that a row tests, and answer those alone; a hole in the kernel is a
hole here; time and caches can be watched. Under `process`, read the warning. A row's tests are trusted: one that gives
what the code returned to eval, exec or pickle runs the model's code where the verdict is made (`assert eval(solve())`),
and one that swallows what the code raises (`except Exception: pass`; an IndexError out of its own `__getitem__`, an
AttributeError under `hasattr`) passes code that raises. A stub cannot carry classes, callbacks or arguments changed in
place: a test that needs them is an error, never passed, and so is one that never calls the code, such as a function or
a unittest.TestCase that nothing runs. Python's standard library alone is there.
"""
