// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/releasetest"
)

// everyType are the types of messages by name.
var everyType = map[string]Type{"Hello": Hello, "Ready": Ready, "Leave": Leave, "Keep": Keep, "Commit": Commit, "Drop": Drop, "Transfer": Transfer, "Accept": Accept,
	"Reject": Reject, "Find": Find, "Status": Status, "Send": Send, "Suspend": Suspend, "Release": Release, "Commits": Commits, "Forget": Forget, "Load": Load,
	"Agree": Agree, "Welcome": Welcome, "Error": Error, "OK": OK, "Give": Give, "Move": Move, "Replaced": Replaced, "Report": Report, "Alone": Alone,
	"Loads": Loads, "Members": Members, "Limits": Limits}

// This version reads the messages of every release, and their types have their numbers.
func TestMessagesOfReleases(t *testing.T) {
	source, err := os.ReadFile("types.go")
	if err == nil && len(regexp.MustCompile(`(?m)^\t\w+ +Type = 0x`).FindAll(source, -1)) != len(everyType) {
		t.Error("types.go has other types than everyType: add them")
	}
	written := map[string][]byte{}
	for name, typ := range everyType {
		n := uint64(typ)
		m := Message{Type: typ, Flags: Crashed, Seq: 0x01000000 + uint32(n), Session: 0x1112131415161700 + n, Read: 0x2122232425262700 + n, Written: 0x3132333435363700 + n,
			Number: 0x41424300 + uint32(n), Name: "member-0", Text: "telemetry", State: []byte("state"), Unread: []byte("unread")}
		if typ == Keep {
			m.Number = uint32(Listener)
		}
		b, err := m.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		written[name] = b
	}
	large := Message{Type: Give, Flags: StateFD | Returned, Sizes: [2]uint64{1 << 20, 5}}
	if written["Give, memfd"], err = large.Append(nil); err != nil {
		t.Fatal(err)
	}
	releasetest.Messages(t, "messages.json", written, func(b []byte) (any, error) {
		m, err := parse(b)
		return struct {
			Message
			Kind string // by number
		}{m, fmt.Sprintf("%#x", uint8(m.Type))}, err
	})
}

// This version reads the boards of members of every release.
func TestBoardsOfReleases(t *testing.T) {
	b, _ := board(t, 1)
	s := b.Allocate()
	for n := range uint64(3) {
		if !s.Commit(&Message{Session: 7, Read: 1<<40 + n, Written: 1<<41 + n, State: bytes.Repeat([]byte("s"), int(n)+1), Unread: []byte("unread")}) {
			t.Fatal("no room")
		}
	}
	const slot = 4096
	bytesOf := make([]byte, slot)
	if _, err := unix.Pread(b.FD(), bytesOf, 0); err != nil {
		t.Fatal(err)
	}
	releasetest.Messages(t, "board.json", map[string][]byte{"slot": bytesOf}, func(text []byte) (any, error) {
		b, r := board(t, 1)
		if _, err := unix.Pwrite(b.FD(), text, 0); err != nil {
			return nil, err
		}
		m, n, err := r.Read(0, 7)
		return []any{m, n}, err
	})
}
