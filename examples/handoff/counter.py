# SPDX-License-Identifier: Apache-2.0
"""An example server. It answers each line with its number in the connection.

The number is the session's state. It survives kill -9, a restart and a move.

    PYTHONPATH=clients/python python3 examples/handoff/counter.py LABEL [ADDRESS [MEMBER]]
"""

import selectors
import sys

from weir_handoff import Member, Replaced


class Counter:
    def __init__(self, session):
        self.session, self.partial = session, b""
        self.count = int(session.state or 0)  # None for a new session

    def state(self):
        return str(self.count).encode()

    def answer(self, label):
        """Answers the received lines. Returns False at the end of the session."""
        try:
            data = self.session.recv(4096)
            if not data:
                return False
            *lines, self.partial = (self.partial + data).split(b"\n")
            for line in lines:
                self.count += 1
                self.session.sendall(f"{self.count} {line.decode()}, says {label}\n".encode(), 10)
            self.session.commit(self.state(), self.partial)
            return True
        except BlockingIOError:
            return True
        except OSError:  # also Moved: another process owns the session
            return False


def main(label, address="127.0.0.1", name="0"):
    selector = selectors.DefaultSelector()
    counters = {}

    def move(number, to):
        """Transfers one session, or all sessions for number 0, to a member."""
        for key in [k for k in counters if number in (0, k)]:
            c = counters[key]
            selector.unregister(c.session)
            try:
                member.transfer(c.session, to, c.state(), c.partial)
                del counters[key]
            except OSError as e:  # the session stays here
                selector.register(c.session, selectors.EVENT_READ, c)
                print(f"{label}: {e}", flush=True)

    member = Member("count", name, move=move)
    member.listen(address, 7001)
    selector.register(member, selectors.EVENT_READ)
    print(f"{label} is ready", flush=True)
    while True:
        try:
            while session := member.accept(0):
                c = counters[session.id] = Counter(session)
                selector.register(session, selectors.EVENT_READ, c)
                while session.pending and c.answer(label):  # the socket does not show these bytes
                    pass
        except Replaced:
            member.close()
            return
        for key, _ in selector.select():
            c = key.data
            if c and c.session.id in counters and not c.answer(label):
                selector.unregister(c.session)
                del counters[c.session.id]
                c.session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
