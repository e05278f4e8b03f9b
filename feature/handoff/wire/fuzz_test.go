// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzBoardReader checks that any content and length of a board gives a commit of the session, or
// an error. Members control both.
func FuzzBoardReader(f *testing.F) {
	slot := func(word, session uint64, state, unread uint32) []byte {
		b := make([]byte, slotSize)
		binary.LittleEndian.PutUint64(b, word)
		half := b[halfAt+int(word&halfBit)*halfSize:]
		binary.LittleEndian.PutUint64(half, session)
		binary.LittleEndian.PutUint32(half[24:], state)
		binary.LittleEndian.PutUint32(half[28:], unread)
		return b
	}
	f.Add(slot(2, 7, 5, 3), uint32(0), uint64(7))
	f.Add(slot(3, 7, SlotRoom, 0), uint32(0), uint64(7))
	f.Add(slot(3, 7, SlotRoom, 1), uint32(0), uint64(7))
	f.Add(slot(2, 7, 1<<32-1, 2), uint32(0), uint64(7))
	f.Add(slot(2, 8, 1, 1)[:slotSize-1], uint32(1<<32-1), uint64(7))
	f.Add([]byte{1}, uint32(0), uint64(0))
	f.Fuzz(func(t *testing.T, content []byte, index uint32, session uint64) {
		fd, err := unix.MemfdCreate("board", unix.MFD_CLOEXEC)
		if err != nil {
			t.Skip("need: kernel: memfd")
		}
		r, err := NewBoardReader(fd)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := unix.Write(fd, content); err != nil && len(content) > 0 {
			t.Fatal(err)
		}
		m, _, err := r.Read(index, session)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Errorf("%v: want malformed", err)
			}
			return
		}
		at := int(index) * slotSize
		if m.Session != session || len(m.State)+len(m.Unread) > SlotRoom || cap(m.State) != len(m.State) ||
			!bytes.Contains(content[at:], m.State) || !bytes.Contains(content[at:], m.Unread) {
			t.Errorf("session %d of slot %d: %+v", session, index, m)
		}
	})
}
