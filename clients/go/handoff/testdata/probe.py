# SPDX-License-Identifier: Apache-2.0
"""A member that obeys the orders on its standard input, line by line, and prints their
results: probe.py KEEPER NAME PORT. probe.c is the same in C and describes the orders.
"""

import errno
import os
import resource
import select
import sys
import time

from weir_handoff import HandoffError, Member, Moved, Replaced

sessions, held = [], []


def take(timeout):
    session = member.accept(timeout)
    if session:
        sessions.append(session)
    return 1 if session else 0


def commit(session, size):
    return 0 if sessions[session].commit(b"\0" * size) else f"-1 {sessions[session].error}"


def obey(what, a, b=0, to=""):
    a, b = int(a), int(b)
    if what == "accept":
        return take(a / 1000)
    if what == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (a, 4096))
        return 0
    if what == "failing":
        was = len(os.listdir("/proc/self/fd"))
        for i in range(a):
            try:
                Member("talk", *(("x", "/nonexistent") if i % 2 else ("a name with spaces", keeper)))
                raise SystemExit("it has joined")
            except HandoffError:
                pass
        return len(os.listdir("/proc/self/fd")) - was
    if what == "reclose":  # closes members twice, with new descriptors in between; counts the closed ones of these
        m = Member("talk", "x", keeper)
        m.close()
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        m.close()
        del m
        closed = 8
        for fd in others:
            try:
                os.close(fd)
                closed -= 1
            except OSError:
                pass
        return closed
    if what == "hold":  # FILES: gives later descriptors larger numbers
        held.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(a))
        return 0
    if what == "sendall":  # SESSION MEBIBYTES
        sessions[a].sendall(b"\0" * (b << 20), 10)
        return 0
    if what == "commit":
        return commit(a, b)
    if what == "idle":
        end, poll = time.monotonic() + a / 1000, select.poll()
        poll.register(member, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            try:
                if poll.poll(left * 1000):
                    take(0)
            except Replaced:
                pass
        return 0
    if what == "flood":
        return 0 if all([commit(a, 1000) == 0 for _ in range(b)]) else -1
    if what == "transfer":
        try:
            member.transfer(sessions[a], to, b"\0" * b)
        except OSError:
            if sessions[a].moved:
                raise Moved() from None
            raise
        return 0
    if what == "recv":
        return len(sessions[a].recv(b))
    if what == "send":
        return sessions[a].send(b"\0" * b)
    if what == "forget":
        member.forget()
        return 0
    if what == "close":
        sessions[a].close()
        return 0
    raise SystemExit(what)


keeper, name, port = sys.argv[1:]
member = Member("talk", name, keeper)
member.listen("127.0.0.1", int(port))
print("ready", flush=True)
for line in sys.stdin:
    begin = time.monotonic()
    try:
        result = obey(*line.split())
    except (OSError, Replaced) as e:
        result = f"-1 {e}"
        if isinstance(e, Moved):
            result = "-1 ESTALE"
        elif isinstance(e, OSError) and e.errno == errno.EMFILE:
            result = "-1 EMFILE"
    print(line.split()[0], result, round((time.monotonic() - begin) * 1000), "ms", flush=True)
member.close()
