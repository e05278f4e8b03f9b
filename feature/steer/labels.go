// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Bindings lead to services by number: 65,536 of them, which a name gets when it is
// first bound or registered. steer_named says where a number leads; steer_labels,
// which only user space reads, has the names.

const (
	maxNamed = 1 << 16
	// MaxLabel is how long the name of a service may be that bindings lead to, in
	// bytes. It is what systemd and tubular allow.
	MaxLabel = 255
)

// label is what steer_labels has of a name.
type label struct {
	ID       uint32
	Bindings uint32 // that lead to it
}

type labelKey [MaxLabel + 1]byte // NUL-padded

// ErrLabel says that a name cannot be that of a service.
var ErrLabel = errors.New("no name for a service")

func keyOfLabel(name string) (k labelKey, err error) {
	if name == "" || len(name) > MaxLabel || bytes.IndexByte([]byte(name), 0) >= 0 {
		return k, fmt.Errorf("%w: %.80q: want 1 to %d bytes, none of them 0", ErrLabel, name, MaxLabel)
	}
	copy(k[:], name)
	return k, nil
}

// checkLabel says what is wrong with a new name. Names that are there may be any
// keyOfLabel: previous versions took every byte.
func checkLabel(name string) error {
	if _, err := keyOfLabel(name); err != nil {
		return err
	}
	if printable.Text(name) != name || strings.TrimSpace(name) != name {
		return fmt.Errorf("%w: %q: want visible characters of UTF-8, and spaces only inside", ErrLabel, name)
	}
	return nil
}

func (k labelKey) String() string { return string(bytes.TrimRight(k[:], "\x00")) }

// dispatchMaps are the maps of a dispatch that only user space knows.
func dispatchMaps() []*ebpf.MapSpec {
	return []*ebpf.MapSpec{
		{Name: "steer_labels", Type: ebpf.Hash, KeySize: uint32(len(labelKey{})), ValueSize: uint32(unsafe.Sizeof(label{})),
			MaxEntries: maxNamed, Flags: unix.BPF_F_NO_PREALLOC},
		{Name: "steer_registry", Type: ebpf.Array, KeySize: 4, ValueSize: uint32(unsafe.Sizeof(registry{})), MaxEntries: 1},
	}
}

// registry is the one value of steer_registry.
type registry struct {
	Next       uint32 // number that was never given to a name
	Unfinished uint32 // 1: bindings may have changed without their counts
}

// labels are the names of a namespace's services.
type labels struct{ maps map[string]*ebpf.Map }

func (s *labels) registry() (r registry, err error) {
	err = s.maps["registry"].Lookup(uint32(0), &r)
	return r, err
}

func (s *labels) marked() (bool, error) {
	r, err := s.registry()
	return r.Unfinished != 0, err
}

func (s *labels) mark(unfinished bool) error {
	r, err := s.registry()
	if err != nil {
		return err
	}
	r.Unfinished = 0
	if unfinished {
		r.Unfinished = 1
	}
	return s.maps["registry"].Put(uint32(0), r)
}

// get finds a name.
func (s *labels) get(name string) (x label, ok bool, err error) {
	k, err := keyOfLabel(name)
	if err != nil {
		return x, false, err
	}
	err = s.maps["labels"].Lookup(k, &x)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return x, false, nil
	}
	return x, err == nil, err
}

func (s *labels) put(name string, x label) error {
	k, err := keyOfLabel(name)
	if err != nil {
		return err
	}
	return s.maps["labels"].Put(k, x)
}

// all reads every name.
func (s *labels) all() (map[string]label, error) {
	out := map[string]label{}
	keys, values := make([]labelKey, 4096), make([]label, 4096)
	for at := new(ebpf.MapBatchCursor); ; {
		n, err := s.maps["labels"].BatchLookup(at, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, fmt.Errorf("reading the names of services: %w", err)
		}
		for i, k := range keys[:n] {
			out[k.String()] = values[i]
		}
		if err != nil {
			return out, nil
		}
	}
}

// nameOf finds the name of a number. It reads all names.
func (s *labels) nameOf(id uint32) (string, error) {
	all, err := s.all()
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

// forget frees a name's number.
func (s *labels) forget(name string) error {
	k, err := keyOfLabel(name)
	if err != nil {
		return err
	}
	return s.maps["labels"].Delete(k)
}

// count writes how many bindings lead to each number, and forgets the names of those
// that nothing leads to and that have no socket.
func (d *dispatch) count(counts map[uint32]uint32) error {
	all, err := d.labels.all()
	if err != nil {
		return err
	}
	for name, x := range all {
		switch n := counts[x.ID]; {
		case n == 0 && !d.hasSocket(x.ID):
			err = d.labels.forget(name)
		case n != x.Bindings:
			err = d.labels.put(name, label{x.ID, n})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// acquire finds a name, or gives it a number.
func (d *dispatch) acquire(name string) (x label, err error) {
	x, ok, err := d.labels.get(name)
	if err != nil || ok {
		return x, err
	}
	r, err := d.labels.registry()
	if err != nil {
		return x, err
	}
	fresh := r.Next < maxNamed // nothing is there yet by that number
	if fresh {
		x.ID = r.Next
		r.Next++
		err = d.maps("registry").Put(uint32(0), r)
	} else if x.ID, err = d.freeNumber(); err == nil {
		err = d.clear(x.ID)
	}
	if err != nil {
		return x, err
	}
	n := bpf.SteerNamed{}
	if p := d.services[name]; p != nil {
		n = p.named()
	}
	if n != (bpf.SteerNamed{}) || !fresh {
		if err := d.maps("named").Put(x.ID, n); err != nil {
			return x, err
		}
	}
	kernel.Step("steer:numbered")
	return x, d.labels.put(name, x)
}

func (d *dispatch) maps(name string) *ebpf.Map { return d.pins.Maps[name] }

// freeNumber takes the number of a name to which nothing leads and that has no
// socket.
func (d *dispatch) freeNumber() (uint32, error) {
	all, err := d.labels.all()
	if err != nil {
		return 0, err
	}
	taken := make([]bool, maxNamed)
	for name, x := range all {
		if x.Bindings > 0 || d.services[name] != nil || d.hasSocket(x.ID) {
			taken[x.ID] = true
			continue
		}
		k, _ := keyOfLabel(name)
		if err := d.maps("labels").Delete(k); err != nil {
			return 0, err
		}
	}
	for id, is := range taken {
		if !is {
			return uint32(id), nil
		}
	}
	return 0, fmt.Errorf("namespace %s has %d services that something is bound to or that have sockets, the most it can: unbind or unregister one", d.scope, maxNamed)
}

func (e *engine) hasSocket(id uint32) bool {
	for kind := range uint32(kinds4) {
		if e.given(id, kind) != 0 {
			return true
		}
	}
	return false
}

// clear takes away what a number had as another name's.
func (d *dispatch) clear(id uint32) error {
	for kind := range uint32(kinds4) {
		if err := d.maps("given").Delete(id*kinds4 + kind); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
			return err // EINVAL: nothing is there (sock_map_delete_elem)
		}
	}
	return kernel.ZeroPerCPU[bpf.SteerHits](d.maps("hits"), id)
}

const (
	noEndpoint = 255 // STEER_NO_ENDPOINT
	bypassed   = 254 // STEER_BYPASSED
)

// named is where bindings to a service of the configuration lead. Of several
// listens of a protocol the first counts.
func (p *published) named() bpf.SteerNamed {
	n := bpf.SteerNamed{Service: p.ID + 1, Endpoint: [kinds4]uint8{noEndpoint, noEndpoint, noEndpoint, noEndpoint}}
	for i, ep := range p.Service.Endpoints() {
		kind := kindOfPacket(ep.Proto == unix.IPPROTO_TCP, ep.Family == unix.AF_INET6)
		if n.Endpoint[kind] == noEndpoint {
			n.Endpoint[kind] = uint8(i)
		}
	}
	if p.Bypassed {
		n.Endpoint = [kinds4]uint8{bypassed, bypassed, bypassed, bypassed}
	}
	return n
}

// syncNamed makes steer_named say where the services of the configuration are. It
// comes after the services' maps are in place, and before the number of one that is
// gone can be another's.
func (e *engine) syncNamed() error {
	m := e.pins.Maps["named"]
	if m == nil {
		return nil
	}
	want := map[uint32]bpf.SteerNamed{}
	names := labels{maps: e.pins.Maps}
	for name, p := range e.services {
		x, ok, err := names.get(name)
		if err != nil {
			return err
		}
		if ok {
			want[x.ID] = p.named()
		}
	}
	size := int(m.MaxEntries() * m.ValueSize())
	b, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping %v: %w", m, err)
	}
	defer unix.Munmap(b)
	have := unsafe.Slice((*uint64)(unsafe.Pointer(&b[0])), m.MaxEntries())
	for id := range have {
		// One store: a packet must not meet one service with another one's endpoint.
		n := want[uint32(id)]
		if now := *(*uint64)(unsafe.Pointer(&n)); now != have[id] {
			atomic.StoreUint64(&have[id], now)
			kernel.Step("steer:named")
		}
	}
	return nil
}
