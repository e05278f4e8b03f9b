// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Keep holds links between this process and the next one.
type Keep interface {
	Put(link string, fd int) error
	Remove(link string)
}

// Handed configures an engine for sessions handed over by bfdd.
type Handed struct {
	Text  []byte              // JSON, identifies the owner of the sessions; an engine with another text is not adopted
	Links map[string]*os.File // links held by Keep, by name; OpenHanded closes the files
	Keep  Keep                // nil: links end with the process
}

// OpenHanded opens an engine for sessions owned by a process. bfdd hands them over, and must notice at once when
// nobody runs them. So their maps are pinned for readers, but their links are not.
//
// When the process ends, for any reason, the sessions end without telling the peers. With Keep they continue, and the
// next process takes them over if Adopted returns true. The sessions of a stopped process continue too.
func OpenHanded(ctx context.Context, root *kernel.Root, ns *netns.Handle, tick time.Duration, h Handed) (*Engine, error) {
	l, err := root.Lock(ctx)
	if err != nil {
		closeFiles(h.Links)
		return nil, err
	}
	defer l.Unlock()
	e := &Engine{root: root, ns: ns, instance: instanceKey(netnsScope(ns), handedName), tick: tick, unpinned: &unpinnedLinks{keep: h.Keep, links: map[string]kernel.Link{}}}
	anew := false
	err = e.open(ctx, l, func(l *kernel.WriteLock) (map[string]*ebpf.Map, error) {
		out, other, err := e.adopt(l, h)
		if out != nil || err != nil {
			anew = other
			return out, err
		}
		return e.publishHanded(l, h.Text)
	})
	if err == nil && anew {
		err = e.upgrade(ctx, l)
		if err != nil {
			e.Close()
		}
	}
	if err != nil {
		if ctx.Err() == nil { // the next try starts anew, and kept links would run beside it
			e.unpinned.forgetAll()
			for name := range h.Links {
				e.unpinned.forget(name)
			}
		}
		return nil, err
	}
	return e, nil
}

// Adopted reports whether the sessions come from the previous process.
func (e *Engine) Adopted() bool { return e.adopted }

// adopt opens the state left by the previous process if it is usable. Otherwise it removes it and returns no maps.
// other reports programs of another weir version.
func (e *Engine) adopt(l *kernel.WriteLock, h Handed) (out map[string]*ebpf.Map, other bool, err error) {
	defer closeFiles(h.Links)
	m, err := l.Meta(e.instance)
	if err == nil {
		if err := m.RequireABI(e.instance, ABI); err != nil {
			return nil, false, err
		}
	}
	if err != nil || string(m.Config) != string(h.Text) || len(h.Links) == 0 {
		for name := range h.Links { // also links without pins: the pins were removed meanwhile
			e.unpinned.forget(name)
		}
		return nil, false, errors.Join(e.orphanPinned(l), l.Remove(e.instance)) // also unreadable instances, because this process owns the name
	}
	o, err := l.Open(e.instance)
	if err != nil {
		return nil, false, err
	}
	for pin := range pins {
		if o.Maps[pin] == nil || o.Maps[ownersPin] == nil {
			o.Close()
			return nil, false, fmt.Errorf("%s: the map %s or %s is missing", e.instance, pin, ownersPin)
		}
	}
	for name, f := range h.Links {
		ln, err := kernel.LinkFrom(f)
		if err != nil { // attached again later
			e.unpinned.forget(name)
			continue
		}
		e.unpinned.links[name] = ln
	}
	e.owners, e.adopted = o.Maps[ownersPin], true
	return o.Maps, m.Object != kernel.ObjectHash(bpf.Object()), nil
}

func closeFiles(files map[string]*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func (e *Engine) publishHanded(l *kernel.WriteLock, text []byte) (map[string]*ebpf.Map, error) {
	out, err := e.newMaps(l)
	if err != nil {
		return out, err
	}
	e.owners, err = ebpf.NewMap(&ebpf.MapSpec{Name: "bfd_owners", Type: ebpf.Hash, KeySize: 4, ValueSize: ownerSize, MaxEntries: maxSessions})
	if err != nil {
		return out, fmt.Errorf("creating the map of owners: %w", err)
	}
	out[ownersPin] = e.owners
	return out, e.publishWith(l, text, out)
}

// orphanPinned orphans the links judged by sessions of an ended process.
func (e *Engine) orphanPinned(l *kernel.WriteLock) error {
	o, err := l.Open(e.instance)
	if err != nil {
		return nil // nothing readable
	}
	defer o.Close()
	of := Engine{maps: o.Maps, tables: newTables(o.Maps)}
	return of.each(func(_ uint32, c *bpf.BfdBfdSetup) {
		if c.Link != 0 {
			e.orphan(int(c.Link))
		}
	})
}

// Abandon ends the sessions for good and removes all kept links and pins. The caller then closes the engine.
func (e *Engine) Abandon(ctx context.Context) error {
	all, err := e.Sessions()
	if err == nil {
		err = e.Delete(slices.Collect(maps.Keys(all))...)
	}
	err = errors.Join(err, e.GiveBack(0))
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unpinned.forgetAll()
	l, lerr := e.root.Lock(ctx)
	if lerr != nil {
		return errors.Join(err, lerr)
	}
	defer l.Unlock()
	if e.current() != nil {
		return err // the instance belongs to another engine
	}
	return errors.Join(err, l.Remove(e.instance))
}

// Owner identifies the bfdd connection of a session. No program reads it.
type Owner struct {
	Connection uint64 // cookie of its socket
	Version    byte   // of the protocol on it
	Device     string // device name
}

// Map of owners: discriminator → connection (8 bytes, native byte order), version (1), padding (7), device (16,
// zero-padded).
const (
	ownersPin  = "owners"
	ownerSize  = 32
	deviceSize = 16 // IFNAMSIZ
)

// SetOwner records a session's owner. Delete removes it.
func (e *Engine) SetOwner(discriminator uint32, o Owner) error {
	v := make([]byte, ownerSize)
	binary.NativeEndian.PutUint64(v, o.Connection)
	v[8] = o.Version
	copy(v[ownerSize-deviceSize:], o.Device)
	return e.owners.Put(discriminator, v)
}

func (e *Engine) disown(discriminator uint32) error {
	if e.owners == nil {
		return nil
	}
	if err := e.owners.Delete(discriminator); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("deleting the owner of a session: %w", err)
	}
	return nil
}

// Owners returns the owners of all sessions by discriminator.
func (e *Engine) Owners() (map[uint32]Owner, error) { return readOwners(e.owners) }

// Owners reads the owners from the pins.
func (p Published) Owners(r *kernel.Root) (map[uint32]Owner, error) {
	o, err := r.Open(p.Instance(), ownersPin)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	return readOwners(o.Maps[ownersPin])
}

func readOwners(m *ebpf.Map) (map[uint32]Owner, error) {
	out := map[uint32]Owner{}
	var d uint32
	var v [ownerSize]byte
	all := m.Iterate()
	for all.Next(&d, &v) {
		out[d] = Owner{binary.NativeEndian.Uint64(v[:]), v[8], strings.TrimRight(string(v[ownerSize-deviceSize:]), "\x00")}
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("reading owners of sessions: %w", err)
	}
	return out, nil
}

// unpinnedLinks are links held by this process, and by keep for the next one.
type unpinnedLinks struct {
	keep  Keep
	links map[string]kernel.Link
}

func (h *unpinnedLinks) names() ([]string, error) { return slices.Collect(maps.Keys(h.links)), nil }

func (h *unpinnedLinks) add(name string, ln kernel.Link) error {
	h.links[name] = ln
	if h.keep == nil {
		return nil
	}
	fd, err := kernel.LinkFD(ln)
	if err != nil {
		return err
	}
	return h.keep.Put(name, fd)
}

func (h *unpinnedLinks) move(name string, to *ebpf.Program) error {
	return kernel.MoveLink(h.links[name], to)
}

func (h *unpinnedLinks) remove(name string) error {
	ln := h.links[name]
	delete(h.links, name)
	h.forget(name)
	return ln.Close()
}

func (h *unpinnedLinks) forget(name string) {
	if h.keep != nil {
		h.keep.Remove(name)
	}
}

func (h *unpinnedLinks) forgetAll() {
	for name := range h.links {
		h.forget(name)
	}
}

func (h *unpinnedLinks) attached(name string, at kernel.Attachment) bool {
	return at.Verify(h.links[name]) == nil
}

func (h *unpinnedLinks) close() {
	for _, ln := range h.links {
		ln.Close()
	}
}
