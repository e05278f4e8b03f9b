// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Bindings refer to services by number. There are 65,536 numbers. A name gets one when it is first bound or registered.
// steer_named maps a number to its target. steer_labels has the names, for user space only.

const (
	MaxNamed = 1 << 16
	// MaxLabel is the maximum length in bytes of a service name for bindings. systemd and tubular have the same limit.
	MaxLabel = 255
)

// Label is the value of a name in steer_labels.
type Label struct {
	ID       uint32
	Bindings uint32 // number of its bindings
}

type labelMapKey [MaxLabel + 1]byte // NUL-padded

// ErrLabel means that a name is not valid for a service.
var ErrLabel = errors.New("invalid service name")

// LabelKey returns the key of a name in steer_labels. An error wraps ErrLabel.
func LabelKey(name string) (k labelMapKey, err error) {
	if name == "" || len(name) > MaxLabel || bytes.IndexByte([]byte(name), 0) >= 0 {
		return k, fmt.Errorf("%w: %.80q: want 1 to %d bytes without a zero byte", ErrLabel, name, MaxLabel)
	}
	copy(k[:], name)
	return k, nil
}

func (k labelMapKey) String() string { return string(bytes.TrimRight(k[:], "\x00")) }

// dispatchMaps returns the specs of the dispatch maps used by user space only.
func dispatchMaps() []*ebpf.MapSpec {
	return []*ebpf.MapSpec{
		{Name: "steer_labels", Type: ebpf.Hash, KeySize: uint32(len(labelMapKey{})), ValueSize: uint32(unsafe.Sizeof(Label{})),
			MaxEntries: MaxNamed, Flags: unix.BPF_F_NO_PREALLOC},
		{Name: "steer_registry", Type: ebpf.Array, KeySize: 4, ValueSize: uint32(unsafe.Sizeof(registry{})), MaxEntries: 1},
	}
}

// registry is the one value of steer_registry.
type registry struct {
	Next       uint32 // the first number never assigned
	Unfinished uint32 // 1: bindings may have changed without their counts
}

// Labels reads and writes the service names of a namespace.
type Labels struct{ Maps map[string]*ebpf.Map }

// Registry reads the one value of steer_registry.
func (s *Labels) Registry() (r registry, err error) {
	err = s.Maps["registry"].Lookup(uint32(0), &r)
	return r, err
}

// Marked reports whether bindings may have changed without their counts.
func (s *Labels) Marked() (bool, error) {
	r, err := s.Registry()
	return r.Unfinished != 0, err
}

// Mark records whether bindings may differ from their counts.
func (s *Labels) Mark(unfinished bool) error {
	r, err := s.Registry()
	if err != nil {
		return err
	}
	r.Unfinished = 0
	if unfinished {
		r.Unfinished = 1
	}
	return s.Maps["registry"].Put(uint32(0), r)
}

// Get returns the label of a name.
func (s *Labels) Get(name string) (x Label, ok bool, err error) {
	k, err := LabelKey(name)
	if err != nil {
		return x, false, err
	}
	err = s.Maps["labels"].Lookup(k, &x)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return x, false, nil
	}
	return x, err == nil, err
}

// Put writes the number and the count of a label.
func (s *Labels) Put(name string, x Label) error {
	k, err := LabelKey(name)
	if err != nil {
		return err
	}
	return s.Maps["labels"].Put(k, x)
}

// All reads every name.
func (s *Labels) All() (map[string]Label, error) {
	out := map[string]Label{}
	keys, values := make([]labelMapKey, 4096), make([]Label, 4096)
	for at := new(ebpf.MapBatchCursor); ; {
		n, err := s.Maps["labels"].BatchLookup(at, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, fmt.Errorf("read service names: %w", err)
		}
		for i, k := range keys[:n] {
			out[k.String()] = values[i]
		}
		if err != nil {
			return out, nil
		}
	}
}

// Names returns all names by number.
func (s *Labels) Names() (map[uint32]string, error) {
	all, err := s.All()
	if err != nil {
		return nil, err
	}
	out := make(map[uint32]string, len(all))
	for name, x := range all {
		out[x.ID] = name
	}
	return out, nil
}

// Name returns the name of a number. It reads all names.
func (s *Labels) Name(id uint32) (string, error) {
	all, err := s.All()
	if err != nil {
		return "", err
	}
	for name, x := range all {
		if x.ID == id {
			return name, nil
		}
	}
	return "", fmt.Errorf("service number %d has no name", id)
}

// Forget frees a name's number.
func (s *Labels) Forget(name string) error {
	k, err := LabelKey(name)
	if err != nil {
		return err
	}
	return s.Maps["labels"].Delete(k)
}

// HasSocket reports whether a socket is registered under a number.
func (e *Engine) HasSocket(id uint32) bool {
	for kind := range uint32(KindsIPv4) {
		if e.Given(id, kind) != 0 {
			return true
		}
	}
	return false
}

const (
	NoEndpoint = 255 // STEER_NO_ENDPOINT
	Bypassed   = 254 // STEER_BYPASSED
)

// NamedEndpoints returns the target of bindings to a configured service. With several listens of a protocol and family,
// it uses the first.
func NamedEndpoints(p *record.Service) bpf.SteerNamed {
	n := bpf.SteerNamed{Service: p.ID + 1, Endpoint: [KindsIPv4]uint8{NoEndpoint, NoEndpoint, NoEndpoint, NoEndpoint}}
	for i, ep := range p.Service.Endpoints() {
		kind := KindOfPacket(ep.Proto == unix.IPPROTO_TCP, ep.Family == unix.AF_INET6)
		if n.Endpoint[kind] == NoEndpoint {
			n.Endpoint[kind] = uint8(i)
		}
	}
	if p.Bypassed {
		n.Endpoint = [KindsIPv4]uint8{Bypassed, Bypassed, Bypassed, Bypassed}
	}
	return n
}

// reconcileNamed makes steer_named match the configured services. It runs after the services' maps are in place, and
// before the id of a removed service can be reused.
func (e *Engine) reconcileNamed() error {
	m := e.Pins.Maps["named"]
	if m == nil {
		return nil
	}
	want := map[uint32]bpf.SteerNamed{}
	names := Labels{Maps: e.Pins.Maps}
	for name, p := range e.Services {
		x, ok, err := names.Get(name)
		if err != nil {
			return err
		}
		if ok {
			want[x.ID] = NamedEndpoints(p)
		}
	}
	kept := map[uint32]bool{} // numbers of unreadable services
	for _, name := range e.Kept.Names {
		if x, ok, err := names.Get(name); err == nil && ok {
			kept[x.ID] = true
		}
	}
	size := int(m.MaxEntries() * m.ValueSize())
	b, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %v into memory: %w", m, err)
	}
	defer unix.Munmap(b)
	have := unsafe.Slice((*uint64)(unsafe.Pointer(&b[0])), m.MaxEntries())
	for id := range have {
		// One store: a packet must not see one service with another service's endpoint.
		n := want[uint32(id)]
		if now := *(*uint64)(unsafe.Pointer(&n)); now != have[id] && !kept[uint32(id)] {
			atomic.StoreUint64(&have[id], now)
			kernel.Step("steer:named")
		}
	}
	return nil
}
