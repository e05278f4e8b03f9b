// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"testing"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// TestMemberHoldsSocketLock checks that a member holding a socket's lock blocks neither the keeper nor other members,
// while it passes, transfers or drops the socket.
func TestMemberHoldsSocketLock(t *testing.T) {
	_, socket := run(t, Options{})
	from, to := hello(t, socket, "talk", "0"), hello(t, socket, "talk", "1")
	to.say(&wire.Message{Type: wire.Ready, Seq: 2, Number: 1})
	to.hear(wire.OK)
	kept, id, _ := stream(t)
	from.say(&wire.Message{Type: wire.Keep, Seq: 2, Session: id, Number: 1}, kept)
	from.hear(wire.OK)
	defer nstest.HoldLock(t, kept, nil)()
	from.say(&wire.Message{Type: wire.Transfer, Seq: 3, Session: id, Name: "1"})
	from.refused(wire.Lost)
	from.say(&wire.Message{Type: wire.Drop, Seq: 4, Session: id})
	from.hear(wire.OK)

	passed, id, _ := stream(t)
	defer nstest.HoldLock(t, passed, nil)()
	from.say(&wire.Message{Type: wire.Keep, Seq: 5, Session: id, Number: 1}, passed)
	from.refused(wire.BadSocket)
	to.say(&wire.Message{Type: wire.Ready, Seq: 3, Number: 1})
	to.hear(wire.OK)
}
