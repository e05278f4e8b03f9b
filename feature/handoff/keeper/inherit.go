// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/fdstore"
)

// A keeper that exits in good order leaves its waiting sessions to the next one: a memfd with their descriptions, and
// the sockets. The next keeper removes them from the store before it serves, because a remaining duplicate would keep
// connections open.

// storeName is the name of the descriptors in systemd's file descriptor store.
const storeName = "weir-handoff"

// inheritVersion is the version of the memfd's content. Sessions of another version are reset.
const inheritVersion = 1

// legacy is the memfd's content.
type legacy struct {
	Version  int      `json:"version"`
	Sessions []record `json:"sessions"`
}

// record describes a waiting session.
type record struct {
	ID       uint64    `json:"id"` // the socket's cookie
	Kind     wire.Kind `json:"kind"`
	Service  string    `json:"service"`
	Member   string    `json:"member"`
	User     uint32    `json:"user"` // of the last owner; missing means root
	Label    string    `json:"label"`
	Read     uint64    `json:"read"`
	Written  uint64    `json:"written"`
	State    []byte    `json:"state"`
	Unread   []byte    `json:"unread"`
	HasState bool      `json:"has_state"` // distinguishes nil from empty
	Crashed  bool      `json:"crashed"`
	Waits    time.Time `json:"waits"` // start of the wait
	Since    time.Time `json:"since"`
	Moves    int       `json:"moves"`
}

// Store returns the function to keep waiting sessions in systemd's store when a keeper exits, or nil without such a
// store.
func Store() func(fds []int) error {
	if !fdstore.Available() {
		return nil
	}
	return func(fds []int) error { return fdstore.Put(storeName, fds...) }
}

// Inherited returns the predecessor's descriptors from systemd's store, for Inherit.
func Inherited() ([]*os.File, error) {
	out := fdstore.Take(storeName)
	if len(out) == 0 {
		return nil, nil
	}
	return out, fdstore.Remove(storeName)
}

// bequeath hands the waiting sessions to the store when the keeper exits. The caller resets the remaining ones. k.mu
// is held.
func (k *Keeper) bequeath() error {
	if k.Store == nil {
		return nil
	}
	l := legacy{Version: inheritVersion}
	fds := []int{-1}
	for _, s := range k.sessions {
		if s.owner != nil && s.owner.gone && s.owner.process.exited() {
			err := k.catchUp(s) // its owner died just now
			k.assign(s, nil)
			s.crashed = true
			if err != nil {
				k.Log.Warn(s.ends(), "service", s.service.name, "member", s.member, s.address(), "err", err)
				continue
			}
		}
		if s.owner != nil || whole(s) != nil {
			continue
		}
		l.Sessions = append(l.Sessions, record{ID: s.id, Kind: s.kind, Service: s.service.name, Member: s.member, User: s.user, Label: s.label, Read: s.read, Written: s.written,
			State: s.state, Unread: s.unread, HasState: s.state != nil, Crashed: s.crashed, Waits: s.waits, Since: s.since, Moves: s.moves})
		fds = append(fds, s.fd)
	}
	if len(l.Sessions) == 0 {
		return nil
	}
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("weir-handoff-waiting", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("create a memfd for waiting sessions: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memfd")
	defer f.Close()
	if _, err := f.Write(text); err != nil {
		return fmt.Errorf("create a memfd for waiting sessions: %w", err)
	}
	fds[0] = fd
	if err := k.Store(fds); err != nil {
		return err
	}
	for _, r := range l.Sessions {
		k.remove(k.sessions[r.ID], false)
	}
	k.Log.Info("waiting sessions left to the next keeper", "sessions", len(l.Sessions))
	return nil
}

// Inherit takes over the predecessor's sessions, before Serve. It resets unusable sessions and reports them in the
// error. It closes the files.
func (k *Keeper) Inherit(files []*os.File) error {
	var l legacy
	var errs []error
	sockets := map[uint64]int{} // key: cookie
	for _, f := range files {
		fd, err := own(f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if c, err := sock.Cookie(fd); err == nil {
			sockets[c] = fd
			continue
		}
		errs = append(errs, l.read(os.NewFile(uintptr(fd), "memfd")))
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range l.Sessions {
		fd, ok := sockets[r.ID]
		if !ok {
			errs = append(errs, fmt.Errorf("session %d of %s: its socket is missing: raise FileDescriptorStoreMax= of the unit", r.ID, r.Service))
			continue
		}
		if err := k.inherit(r, fd); err != nil {
			errs = append(errs, fmt.Errorf("session %d of %s: %w", r.ID, r.Service, err))
			continue
		}
		delete(sockets, r.ID)
	}
	for id, fd := range sockets {
		if !slices.ContainsFunc(l.Sessions, func(r record) bool { return r.ID == id }) {
			errs = append(errs, fmt.Errorf("session %d: no record describes it", id))
		}
		sock.Reset(fd)
	}
	if n := len(k.sessions); n > 0 {
		k.Log.Info("waiting sessions taken over from the previous keeper", "sessions", n)
	}
	return errors.Join(errs...)
}

// own duplicates a file's descriptor and closes the file. (File.Fd may clear O_NONBLOCK, which the members share.)
func own(f *os.File) (fd int, err error) {
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	if cerr := raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return -1, cerr
	}
	return fd, err
}

func (l *legacy) read(f *os.File) error {
	defer f.Close()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("read the list of waiting sessions: %w", err)
	}
	if err := json.NewDecoder(f).Decode(l); err != nil {
		l.Sessions = nil // possibly a partial result
		return fmt.Errorf("read the list of waiting sessions: %w", err)
	}
	if l.Version != inheritVersion {
		err := fmt.Errorf("the list of waiting sessions has version %d, want %d", l.Version, inheritVersion)
		l.Sessions = nil
		return err
	}
	return nil
}

// inherit adds a waiting session. The time it has already waited counts.
func (k *Keeper) inherit(r record, fd int) error {
	if err := sock.Check(fd, r.Kind); err != nil {
		return err
	}
	s := &session{id: r.ID, kind: r.Kind, fd: fd, service: k.service(r.Service), member: r.Member, user: r.User, label: r.Label, said: position{r.Read, r.Written}, read: r.Read, written: r.Written,
		unread: r.Unread, crashed: r.Crashed, waits: r.Waits, since: r.Since, moves: r.Moves}
	if r.HasState {
		s.state = append([]byte{}, r.State...)
	}
	if err := whole(s); err != nil {
		return err
	}
	s.local, s.remote = sock.Addresses(fd)
	k.charge(s, s.size(), 1)
	k.sessions[s.id], s.service.sessions[s.id], s.service.orphans[s] = s, s, true
	return nil
}
