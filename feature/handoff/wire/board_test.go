// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func board(t testing.TB, sessions uint64) (*Board, *BoardReader) {
	t.Helper()
	b, err := NewBoard()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if err := b.Size(sessions); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.FcntlInt(uintptr(b.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewBoardReader(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return b, r
}

func TestBoard(t *testing.T) {
	b, r := board(t, 3)
	first, s := b.Allocate(), b.Allocate()
	if first == nil || s == nil || s.Index != 1 || first.Index != 0 {
		t.Fatalf("%+v, %+v", first, s)
	}
	if _, _, err := r.Read(1, 7); !errors.Is(err, ErrMalformed) {
		t.Errorf("nothing was committed: %v", err)
	}
	for i := range uint64(5) {
		want := Message{Session: 7, Read: i, Written: 1<<63 + i, State: bytes.Repeat([]byte{byte(i)}, int(i)), Unread: []byte("unread")[i:]}
		if !s.Commit(&want) {
			t.Fatalf("commit %d: no room", i)
		}
		got, n, err := r.Read(1, 7)
		if err != nil || n != i+1 || got.Read != i || got.Written != want.Written || !bytes.Equal(got.State, want.State) || !bytes.Equal(got.Unread, want.Unread) {
			t.Errorf("commit %d: %+v, %d, %v", i, got, n, err)
		}
	}
	if _, _, err := r.Read(1, 8); !errors.Is(err, ErrMalformed) {
		t.Errorf("another session's: %v", err)
	}
	if _, _, err := r.Read(3, 7); !errors.Is(err, ErrMalformed) {
		t.Errorf("behind the end: %v", err)
	}
	large := Message{Session: 7, State: make([]byte, SlotRoom), Unread: []byte("x")}
	if s.Commit(&large) {
		t.Error("a state that has no room")
	}
	if large.Unread = nil; !s.Commit(&large) {
		t.Error("one that just has")
	}
	if m, n, err := r.Read(1, 7); err != nil || n != 6 || len(m.State) != SlotRoom {
		t.Errorf("%d bytes, %d commits, %v", len(m.State), n, err)
	}
	if _, _, err := r.Read(0, 7); !errors.Is(err, ErrMalformed) {
		t.Errorf("the slot beside it: %v", err)
	}
	third := b.Allocate()
	if third == nil || b.Allocate() != nil {
		t.Error("there are not three")
	}
	s.Give()
	if s = b.Allocate(); s == nil || s.Index != 1 {
		t.Errorf("one that was given back: %+v", s)
	}
	if b.Close(); b.Allocate() != nil {
		t.Error("taken of a board that is closed")
	}
	if !s.Commit(&Message{Session: 9}) { // its user does not notice
		t.Error("no room")
	}
	s.Give()
	first.Give()
	third.Give()
	if b.mem != nil {
		t.Error("it stays mapped")
	}
}

// TestCommitCutOff checks that an interrupted commit changes nothing before its last store, in
// either half.
func TestCommitCutOff(t *testing.T) {
	b, r := board(t, 1)
	s := b.Allocate()
	for i := range uint64(4) {
		if !s.Commit(&Message{Session: 7, Read: i, State: []byte{byte(i)}}) {
			t.Fatal("no room")
		}
		// The next commit, without its last store.
		half := binary.LittleEndian.Uint64(s.mem)&halfBit ^ 1
		copy(s.mem[halfAt+int(half)*halfSize:][:halfSize], bytes.Repeat([]byte{0xff}, halfSize))
		if m, n, err := r.Read(0, 7); err != nil || n != i+1 || m.Read != i || m.State[0] != byte(i) {
			t.Errorf("after commit %d: %+v, %d, %v", i, m, n, err)
		}
	}
}

// TestBoardWhileWritten checks that a reader never gets parts of two commits during fast writes.
func TestBoardWhileWritten(t *testing.T) {
	b, r := board(t, 1)
	s := b.Allocate()
	commit := func(i uint64) {
		n := int(i * 131 % SlotRoom)
		s.Commit(&Message{Session: 7, Read: i, Written: ^i, State: bytes.Repeat([]byte{byte(i)}, n), Unread: bytes.Repeat([]byte{byte(i)}, SlotRoom-n)})
	}
	commit(0)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := uint64(1); ; i++ {
			select {
			case <-stop:
				return
			default:
				commit(i)
			}
		}
	}()
	read, last := 0, uint64(0)
	for range 30_000 {
		m, n, err := r.Read(0, 7)
		if errors.Is(err, errUnsettled) {
			continue
		}
		i := m.Read
		want := bytes.Repeat([]byte{byte(i)}, SlotRoom)
		if err != nil || m.Written != ^i || n != i+1 || i < last || len(m.State) != int(i*131%SlotRoom) || !bytes.Equal(append(m.State, m.Unread...), want) {
			t.Fatalf("commit %d after %d, the %dth: %v", i, last, n, err)
		}
		read, last = read+1, i
	}
	close(stop)
	<-stopped
	t.Logf("%d of 30000 reads, up to commit %d", read, last)
	if read == 0 || last == 0 {
		t.Error("nothing was read")
	}
}

func TestBoardReaderRefuses(t *testing.T) {
	fd, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := NewBoardReader(fd); !errors.Is(err, ErrBadSocket) {
		t.Errorf("no memfd: %v", err)
	}
	b, r := board(t, 2)
	if err := unix.Ftruncate(b.FD(), slotSize); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Read(1, 7); !errors.Is(err, ErrMalformed) {
		t.Errorf("a board made smaller: %v", err)
	}
}

func BenchmarkSlotCommit(b *testing.B) {
	w, _ := board(b, 1)
	s := w.Allocate()
	m := Message{Session: 7, State: make([]byte, 100)}
	for b.Loop() {
		s.Commit(&m)
	}
}
