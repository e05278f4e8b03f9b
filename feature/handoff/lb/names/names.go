// SPDX-License-Identifier: Apache-2.0

// Package names keeps the name of each backend's number in a map pinned beside the flows. A number
// thus belongs to its backend over a restart of the agent: only an agent with a certificate of this
// name gets the number's flows.
//
// A data path of an earlier weir has no such map. The names of its backends are then unknown. An
// agent proves its number by its connection's address, which has the number's location.
package names

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
)

// MapName is the name of the map among the pins.
const MapName = "names"

const (
	room   = 256  // bytes of an entry
	most   = 1023 // entries: the highest number of a backend
	nobody = "\x00"
)

// Owner is the owner of a number: a name, or the location of a backend with an unknown name.
type Owner struct{ Name, Location string }

// Unknown reports whether the owner's name is unknown.
func (o Owner) Unknown() bool { return o.Name == "" }

// Names are the owners of numbers. They are safe for concurrent use.
type Names struct {
	m  *ebpf.Map
	mu sync.Mutex
	of map[move.Backend]Owner
}

// Open reads the owners from a pinned map, and creates the map if it is nil. The caller closes the
// map of its own; Close closes the one of the result.
func Open(pinned *ebpf.Map) (*Names, error) {
	n := &Names{of: map[move.Backend]Owner{}}
	var err error
	if pinned == nil {
		n.m, err = ebpf.NewMap(&ebpf.MapSpec{Name: "lb_names", Type: ebpf.Hash, KeySize: 4, ValueSize: room, MaxEntries: most, Flags: unix.BPF_F_NO_PREALLOC})
		if err != nil {
			return nil, fmt.Errorf("create the map of backends' names: %w", err)
		}
		return n, nil
	}
	if pinned.KeySize() != 4 || pinned.ValueSize() != room {
		return nil, fmt.Errorf("the map of backends' names has entries of %d and %d bytes: want 4 and %d: remove the load balancer (weir lb remove)", pinned.KeySize(), pinned.ValueSize(), room)
	}
	if n.m, err = pinned.Clone(); err != nil {
		return nil, fmt.Errorf("open the map of backends' names: %w", err)
	}
	var number uint32
	value := make([]byte, room)
	it := n.m.Iterate()
	for it.Next(&number, &value) {
		if number <= most {
			n.of[move.Backend(number)] = parse(value)
		}
	}
	if err := it.Err(); err != nil {
		n.m.Close()
		return nil, fmt.Errorf("read the names of backends: %w", err)
	}
	return n, nil
}

// parse reads an entry. An entry without a readable name belongs to an unknown backend.
func parse(value []byte) Owner {
	name, rest, _ := bytes.Cut(value, []byte{0})
	if len(name) > 0 && len(name) < room && readable(string(name)) {
		return Owner{Name: string(name)}
	}
	location, _, _ := bytes.Cut(rest, []byte{0})
	if len(name) > 0 || !readable(string(location)) {
		location = nil
	}
	return Owner{Location: string(location)}
}

func readable(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c == utf8.RuneError || !unicode.IsPrint(c) })
}

// Map returns the map, for its pin.
func (n *Names) Map() *ebpf.Map { return n.m }

// Close closes the map. A pinned one stays.
func (n *Names) Close() { n.m.Close() }

// Owner returns the owner of a number.
func (n *Names) Owner(number move.Backend) (o Owner, owned bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	o, owned = n.of[number]
	return o, owned
}

// Number returns a backend's number, 0 for none.
func (n *Names) Number(name string) move.Backend {
	n.mu.Lock()
	defer n.mu.Unlock()
	for number, o := range n.of {
		if o.Name == name && !o.Unknown() {
			return number
		}
	}
	return 0
}

// All returns the numbers with an owner, sorted.
func (n *Names) All() []move.Backend {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(maps.Keys(n.of))
}

// Keep gives a number to a backend. The caller has checked that it belongs to no other.
func (n *Names) Keep(number move.Backend, name string) error {
	if name == "" || len(name) >= room || !readable(name) {
		return fmt.Errorf("keep the name of backend %d: %.260q: want 1 to %d printable bytes", number, name, room-1)
	}
	return n.put(number, Owner{Name: name}, name)
}

// KeepUnknown keeps a number of an earlier weir for the backend at its location.
func (n *Names) KeepUnknown(number move.Backend, location string) error {
	return n.put(number, Owner{Location: location}, nobody+location[:min(len(location), room-2)])
}

func (n *Names) put(number move.Backend, o Owner, text string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if was, owned := n.of[number]; owned && was == o {
		return nil
	}
	value := make([]byte, room)
	copy(value, text)
	if err := n.m.Put(uint32(number), value); err != nil {
		return fmt.Errorf("keep the name of backend %d: %w", number, err)
	}
	n.of[number] = o
	return nil
}

// Free lets another backend have a number.
func (n *Names) Free(number move.Backend) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.m.Delete(uint32(number)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("free the number of backend %d: %w", number, err)
	}
	delete(n.of, number)
	return nil
}
