// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// TestLayout checks the bytes of the example in docs/HANDOFF-PROTOCOL.md. Clients in other languages rely on
// them.
func TestLayout(t *testing.T) {
	m := Message{Type: Transfer, Flags: Crashed, Seq: 0x01020304, Session: 0x1112131415161718, Read: 0x2122232425262728,
		Written: 0x3132333435363738, Number: 0x41424344, Name: "b", Text: "xyz", State: []byte{0xee, 0xff}, Unread: []byte{0xdd}}
	b, err := m.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	const want = "0107020004030201" + "1817161514131211" + "2827262524232221" + "3837363534333231" + "44434241" + "01000300" + "02000000" + "01000000" + "62" + "78797a" + "eeff" + "dd"
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
}

func TestRoundTrip(t *testing.T) {
	for _, m := range []Message{
		{Type: Hello, Seq: 1, Number: TakesOrphans | Exact, Name: "0", Text: "telemetry"},
		{Type: Commit, Flags: KeepState, Session: 7, Read: 1 << 40, Written: 3},
		{Type: Give, Flags: 0x7fff, Session: 1<<64 - 1, Name: strings.Repeat("n", MaxName), Text: strings.Repeat("t", MaxText), State: bytes.Repeat([]byte{1}, MaxInline-1), Unread: []byte{7}},
		{Type: Commit, Unread: []byte("u")},
		{Type: Give, Flags: StateFD, Sizes: [2]uint64{1 << 20, 5}},
		{Type: 0xfe, Version: 9},
	} {
		b, err := m.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		if m.Version == 0 {
			m.Version = Version
		}
		if got, err := parse(b); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("got %+v, %v; want %+v", got, err, m)
		}
		for _, broken := range [][]byte{b[:len(b)-1], append(bytes.Clone(b), 0), b[:headerSize-1], nil} {
			if m, err := parse(broken); !errors.Is(err, ErrMalformed) && len(broken) != headerSize {
				t.Errorf("%d bytes of %d: %+v, %v; want malformed", len(broken), len(b), m, err)
			}
		}
	}
	for _, m := range []Message{{Name: strings.Repeat("n", MaxName+1)}, {Text: strings.Repeat("n", MaxText+1)}, {State: make([]byte, MaxInline), Unread: []byte{1}}, {Flags: StateFD, State: []byte{1}}} {
		if _, err := m.Append(nil); !errors.Is(err, ErrMalformed) {
			t.Errorf("too long: %v, want malformed", err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, m := range []Message{{Type: Hello, Name: "a", Text: "s"}, {Type: Commit, State: []byte("state")}} {
		b, _ := m.Append(nil)
		f.Add(b)
	}
	f.Add(bytes.Repeat([]byte{0xff}, headerSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parse(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("%v: want malformed", err)
			}
			return
		}
		again, err := m.Append(nil)
		if err != nil {
			t.Fatalf("what was parsed cannot be written: %v", err)
		}
		// Only the reserved byte is lost.
		c := bytes.Clone(b)
		c[37] = 0
		if !bytes.Equal(again, c) {
			t.Errorf("%x became %x", b, again)
		}
	})
}

func TestCodes(t *testing.T) {
	for c := BadVersion; c <= Lost; c++ {
		err := error(Errorf(c, "words %d", c))
		if !errors.Is(err, codeErrors[c]) || codeErrors[c] == nil {
			t.Errorf("code %d: %v is no %v", c, err, codeErrors[c])
		}
		m := Message{Type: Error, Number: uint32(c)}
		if got := m.Err(); !errors.Is(got, codeErrors[c]) || got.Error() != codeErrors[c].Error() {
			t.Errorf("code %d without words: %v", c, got)
		}
	}
	if m := (Message{Type: Error, Number: 99}); m.Err() == nil || !strings.Contains(m.Err().Error(), "99") {
		t.Errorf("an unknown code: %v", m.Err())
	}
}

func TestValidName(t *testing.T) {
	for s, want := range map[string]bool{"a": true, "slot-0": true, "nfacctd@0.service": true, strings.Repeat("n", MaxName): true,
		"": false, "a b": false, "ä": false, "a\n": false, strings.Repeat("n", MaxName+1): false} {
		if ValidName(s) != want {
			t.Errorf("%q: %v, want %v", s, !want, want)
		}
	}
}

// Every request has a name for logs, and a number if it is unknown.
func TestRequestNames(t *testing.T) {
	for request := Hello; request <= Agree; request++ {
		if name := request.Request(); strings.HasPrefix(name, "0x") {
			t.Errorf("request %s has no name", name)
		}
	}
	if name := Type(0x7f).Request(); name != "0x7f" {
		t.Errorf("an unknown request is named %s", name)
	}
}
