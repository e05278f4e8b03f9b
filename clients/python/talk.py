# SPDX-License-Identifier: Apache-2.0
"""An example server in Python, with sessions that can move at any time and survive SIGKILL.
It answers each message of 7 bytes with 8 bytes, the hash of all messages so far. weir's
tests use it, too: talk.py KEEPER NAME PORT [PROOF]
"""

import selectors
import struct
import sys

from weir_handoff import SHORT, HandoffError, Member, Replaced

QUESTION = 7


def fnv(hash_, question):
    x = 14695981039346656037
    for b in struct.pack("<Q", hash_) + question:
        x = (x ^ b) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return x


class Talk:
    def __init__(self, session):
        self.session = session
        self.hash, self.count = struct.unpack_from("<QQ", session.state) if session.state else (14695981039346656037, 0)
        self.partial = b""

    def state(self):
        return struct.pack("<QQ", self.hash, self.count)

    def answer(self):
        """Answers the received messages. Returns False at the end."""
        try:
            return self._answer()
        except BlockingIOError:
            return True
        except OSError:  # also Moved: another process owns it
            return False

    def _answer(self):
        data = self.session.recv(3000)
        if not data:
            return False
        data = self.partial + data
        out = bytearray()
        whole = len(data) - len(data) % QUESTION
        for i in range(0, whole, QUESTION):
            self.hash = fnv(self.hash, data[i:i + QUESTION])
            self.count += 1
            out += struct.pack("<Q", self.hash)
        self.partial = data[whole:]
        self.session.sendall(out, 10)
        self.session.commit(self.state(), self.partial)
        return True


def main(keeper, name, port, proof=1):
    selector = selectors.DefaultSelector()
    talks = set()

    def end(talk):
        talks.discard(talk)
        selector.unregister(talk.session)

    def give(to, number=0):
        moved = failed = 0
        for talk in list(talks):
            if number not in (0, talk.session.id):
                continue
            selector.unregister(talk.session)
            try:
                member.transfer(talk.session, to, talk.state(), talk.partial)
                talks.discard(talk)
                moved += 1
            except HandoffError as e:
                selector.register(talk.session, selectors.EVENT_READ, talk)
                print("talk:", e, file=sys.stderr)
                failed += 1
        return f"moved {moved}, failed {failed}"

    member = Member("talk", name, keeper, move=lambda number, to: give(to, number), proof=float(proof))
    member.listen("127.0.0.1", int(port))
    selector.register(member, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        scarce = False
        try:
            while session := member.accept(0):
                talk = Talk(session)
                talks.add(talk)
                selector.register(session, selectors.EVENT_READ, talk)
                going = True
                while going and session.pending:  # the socket does not show these bytes
                    going = talk.answer()
                if not going:
                    end(talk)
                    session.close()
        except Replaced:
            print(give(name), flush=True)
            break
        except OSError as e:
            if e.errno not in SHORT:
                raise
            scarce = True
            selector.unregister(member)  # otherwise waiting connections would make each select return at once
        ready = selector.select(0.1 if scarce else None)
        if scarce:
            selector.register(member, selectors.EVENT_READ)
        for key, _ in ready:
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    member.close()
                    return
                print(give(line.strip()), flush=True)
            elif key.data in talks and not key.data.answer():
                end(key.data)
                key.data.session.close()
    member.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
