// SPDX-License-Identifier: Apache-2.0

// Package names keeps the name of each backend's number in a map pinned beside the flows. A number
// thus belongs to its backend over a restart of the agent: only an agent with a certificate of this
// name gets the number's flows.
//
// A data path of an earlier weir has no such map. The names of its backends are then unknown. An
// agent proves its number by its connection's address, which has the number's location.
//
// An entry is a name or a location, see parse, and behind it a trailer: a byte with bit 0 for a loose
// owner, and the time of its latest disconnection. Names above 246 bytes leave no room for a trailer.
package names

import (
	"bytes"
	"encoding/binary"
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
	"github.com/weir-project/weir/kernel"
)

// MapName is the name of the map among the pins.
const MapName = "names"

const (
	room   = 256  // bytes of an entry
	most   = 1023 // entries: the highest number of a backend
	nobody = "\x00"
	// trailer is the offset of the flags and of the time. An earlier weir left it empty.
	trailer = room - 9
	loose   = 1
)

// Owner is the owner of a number: a name, or the location of a backend with an unknown name.
type Owner struct {
	Name, Location string
	// Loose owners lose their number with the end of their connection, location and flows: no agent of
	// the name has registered, or the backend was drained.
	Loose bool
	Left  uint64 // CLOCK_MONOTONIC in ns: the latest disconnection; 0: connected, or unknown
}

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

// Pinned returns the names of numbers from the pins of a load balancer. An earlier weir's data path
// has none; weir serve reports an unreadable map.
func Pinned(root *kernel.Root, inst kernel.Instance) map[move.Backend]string {
	o, err := root.Open(inst, MapName)
	if err != nil {
		return nil
	}
	defer o.Close()
	n, err := Open(o.Maps[MapName])
	if err != nil {
		return nil
	}
	defer n.Close()
	out := map[move.Backend]string{}
	for number, owner := range n.of {
		out[number] = owner.Name
	}
	return out
}

// parse reads an entry. An entry without a readable name belongs to an unknown backend.
func parse(value []byte) Owner {
	name, rest, _ := bytes.Cut(value, []byte{0})
	if len(name) > 0 && len(name) < room && readable(string(name)) {
		o := Owner{Name: string(name)}
		if len(name) < trailer {
			o.Loose, o.Left = value[trailer]&loose != 0, binary.NativeEndian.Uint64(value[trailer+1:])
		}
		return o
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

// Keep gives a number to a backend. The caller has checked that it belongs to no other. A new owner
// is not loose.
func (n *Names) Keep(number move.Backend, name string) error {
	if name == "" || len(name) >= room || !readable(name) {
		return fmt.Errorf("keep the name of backend %d: %.260q: want 1 to %d printable bytes", number, name, room-1)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.of[number].Name == name {
		return nil
	}
	return n.put(number, Owner{Name: name})
}

// Loosen makes the named owner of a number loose, or no longer.
func (n *Names) Loosen(number move.Backend, yes bool) error {
	return n.change(number, func(o *Owner) { o.Loose = yes })
}

// Leave notes the disconnection of a number's named owner, at a reading of the monotonic clock in ns;
// 0: it is connected.
func (n *Names) Leave(number move.Backend, at uint64) error {
	return n.change(number, func(o *Owner) { o.Left = at })
}

func (n *Names) change(number move.Backend, change func(*Owner)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	o, owned := n.of[number]
	if !owned || o.Unknown() {
		return nil
	}
	change(&o)
	return n.put(number, o)
}

// KeepUnknown keeps a number of an earlier weir for the backend at its location.
func (n *Names) KeepUnknown(number move.Backend, location string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.put(number, Owner{Location: location})
}

// put writes an entry. The caller holds mu.
func (n *Names) put(number move.Backend, o Owner) error {
	if was, owned := n.of[number]; owned && was == o {
		return nil
	}
	value := make([]byte, room)
	if o.Unknown() {
		copy(value, nobody+o.Location[:min(len(o.Location), room-2)])
	} else if copy(value, o.Name); len(o.Name) < trailer {
		if o.Loose {
			value[trailer] = loose
		}
		binary.NativeEndian.PutUint64(value[trailer+1:], o.Left)
	}
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
