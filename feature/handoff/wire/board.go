// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A board is memory of a member that its keeper can read: a memfd with one slot per session. A
// commit to a slot is a few stores and wakes nobody. The keeper reads a slot only when it needs the
// state, after most commits never. A commit survives the death of the process, like a message
// accepted by a socket.
//
// A slot has two halves, written in turn. A word before them has the valid half and the number of
// commits. The word is stored last and atomically, so an interrupted commit leaves the previous one
// valid.

// This is the layout of a slot, in bytes. Numbers in it are little-endian.
const (
	slotSize   = 4096                                    // a page: sessions share none
	halfAt     = 64                                      // of the first half; the word is at 0
	halfSize   = (slotSize - halfAt) / 2                 // 2,016
	halfHeader = 32                                      // session, read, written: 8 each; lengths of state and unread: 4 each
	SlotRoom   = halfSize - halfHeader                   // for state and unread together
	maxSlots   = 1 << 16                                 // of a board: 256 MiB of addresses; only stored pages use memory
	slotTries  = 16                                      // attempts to read a slot between two commits
	halfBit    = uint64(1)                               // of the word: the valid half; the other bits: number of commits
	_          = uint(math.MaxInt32 - maxSlots*slotSize) // fits a 32-bit int
)

// Board is a member's side of a board. It is safe for concurrent use.
type Board struct {
	fd  int
	mem []byte

	mu     sync.Mutex
	free   []uint32
	next   uint32 // first slot never allocated
	used   int
	closed bool
}

// NewBoard creates a board. Call Size before Allocate.
func NewBoard() (*Board, error) {
	fd, err := unix.MemfdCreate("weir-handoff-board", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("a memfd for commits: %w", err)
	}
	return &Board{fd: fd}, nil
}

// FD returns the memfd. The board keeps owning it.
func (b *Board) FD() int { return b.fd }

// Size makes room for a number of sessions, up to the largest board. Only the first call has an
// effect.
func (b *Board) Size(sessions uint64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem != nil || b.closed {
		return nil
	}
	size := int(min(sessions, maxSlots)) * slotSize
	if size == 0 {
		return nil
	}
	if err := unix.Ftruncate(b.fd, int64(size)); err != nil {
		return fmt.Errorf("a memfd for commits: %w", err)
	}
	mem, err := unix.Mmap(b.fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("a memfd for commits: %w", err)
	}
	b.mem = mem
	return nil
}

// Allocate returns a free slot, nil if there is none.
func (b *Board) Allocate() *Slot {
	b.mu.Lock()
	defer b.mu.Unlock()
	var i uint32
	switch n := len(b.free); {
	case b.closed:
		return nil
	case n > 0:
		i, b.free = b.free[n-1], b.free[:n-1]
	case int(b.next) < len(b.mem)/slotSize:
		i, b.next = b.next, b.next+1
	default:
		return nil
	}
	b.used++
	return &Slot{Index: i, mem: b.mem[int(i)*slotSize:][:slotSize:slotSize], board: b}
}

// Close releases the memory as soon as all slots are returned.
func (b *Board) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	b.closed = true
	unix.Close(b.fd)
	b.unmap()
}

func (b *Board) unmap() {
	if b.closed && b.used == 0 && b.mem != nil {
		unix.Munmap(b.mem)
		b.mem = nil
	}
}

// Slot is a session's part of a board. It is not safe for concurrent use.
type Slot struct {
	Index uint32 // on the board
	mem   []byte
	board *Board
}

// Give returns the slot to the board.
func (s *Slot) Give() {
	s.board.mu.Lock()
	defer s.board.mu.Unlock()
	s.board.free = append(s.board.free, s.Index)
	s.board.used--
	s.board.unmap()
}

// Commit stores the session, positions, state and unread of a message. It returns false if they do
// not fit. On return the keeper can read them, even if this process dies.
func (s *Slot) Commit(m *Message) bool {
	if len(m.State)+len(m.Unread) > SlotRoom {
		return false
	}
	word := loadWord(s.mem)
	half := (word & halfBit) ^ 1
	b := s.mem[halfAt+int(half)*halfSize:][:halfSize]
	binary.LittleEndian.PutUint64(b, m.Session)
	binary.LittleEndian.PutUint64(b[8:], m.Read)
	binary.LittleEndian.PutUint64(b[16:], m.Written)
	binary.LittleEndian.PutUint32(b[24:], uint32(len(m.State)))
	binary.LittleEndian.PutUint32(b[28:], uint32(len(m.Unread)))
	n := copy(b[halfHeader:], m.State)
	copy(b[halfHeader+n:], m.Unread)
	storeWord(s.mem, (word|halfBit)+1+half)
	return true
}

// Commits returns the number of commits to the slot, of all its sessions.
func (s *Slot) Commits() uint64 { return loadWord(s.mem) >> 1 }

// loadWord and storeWord are atomic. They order the accesses around them.
func loadWord(mem []byte) uint64 {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], atomic.LoadUint64((*uint64)(unsafe.Pointer(&mem[0]))))
	return binary.LittleEndian.Uint64(b[:])
}

func storeWord(mem []byte, v uint64) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&mem[0])), binary.NativeEndian.Uint64(b[:]))
}

// BoardReader is the keeper's side of a board. It uses pread(2), so a member cannot harm the keeper
// by truncating the memfd. It is safe for concurrent use.
type BoardReader struct{ f *os.File }

// NewBoardReader returns a reader that owns the memfd of a board. The error wraps [ErrBadSocket]
// for another descriptor, because reading one could block.
func NewBoardReader(fd int) (*BoardReader, error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil {
		return nil, fmt.Errorf("%w: a board's descriptor must be a memfd: %w", ErrBadSocket, err)
	}
	return &BoardReader{os.NewFile(uintptr(fd), "board")}, nil
}

// Close closes the memfd.
func (r *BoardReader) Close() error { return r.f.Close() }

// errUnsettled reports a slot written too often during a read. Its owner is alive.
var errUnsettled = errors.New("a slot changes while it is read")

// Read returns the latest commit of a slot and its number of commits. The error wraps
// [ErrMalformed] if the slot has none of that session.
func (r *BoardReader) Read(index uint32, session uint64) (m Message, commits uint64, err error) {
	at := int64(index) * slotSize
	word := func() (uint64, error) {
		var b [8]byte
		_, err := r.f.ReadAt(b[:], at)
		return binary.LittleEndian.Uint64(b[:]), err
	}
	b := make([]byte, halfSize)
	for range slotTries {
		before, err := word()
		if err != nil {
			return m, 0, fmt.Errorf("%w: slot %d of the board: %w", ErrMalformed, index, err)
		}
		if _, err := r.f.ReadAt(b, at+halfAt+int64(before&halfBit)*halfSize); err != nil {
			return m, 0, fmt.Errorf("%w: slot %d of the board: %w", ErrMalformed, index, err)
		}
		// The next commit uses the other half. The one after it overwrites this half.
		if after, err := word(); err != nil || after != before {
			continue
		}
		m = Message{Session: binary.LittleEndian.Uint64(b), Read: binary.LittleEndian.Uint64(b[8:]), Written: binary.LittleEndian.Uint64(b[16:])}
		state, unread := uint64(binary.LittleEndian.Uint32(b[24:])), uint64(binary.LittleEndian.Uint32(b[28:]))
		switch {
		case m.Session != session:
			return m, 0, fmt.Errorf("%w: slot %d of the board is of session %d, not %d", ErrMalformed, index, m.Session, session)
		case state+unread > SlotRoom:
			return m, 0, fmt.Errorf("%w: slot %d of the board: a state of %d bytes, %d unread; at most %d together", ErrMalformed, index, state, unread, SlotRoom)
		}
		m.State = b[halfHeader:][:state:state]
		m.Unread = b[halfHeader+state:][:unread]
		return m, before >> 1, nil
	}
	return m, 0, errUnsettled
}
