// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
)

// What follows makes pins as weir of ABI 1 made them, from its object and from
// the configuration that it wrote (testdata/abi1). The types are that weir's: they
// do not change with today's. testdata/README.md says how the next one is made.

type abi1Service struct {
	Seed, Slots, Endpoints, OnEmpty, FirstRow, ID, Flags, Pad uint32
	Bucket                                                    [4096]uint16
}

type abi1Slot struct {
	State, Tgid  uint32
	Since, Start uint64
}

type abi1PortKey struct {
	Port       uint16
	Proto, Pad uint8
}

type abi1PortValue struct {
	Any4Service, Any4Endpoint, Any6Service, Any6Endpoint, Prefixes, Pad uint32
}

type abi1ExitKey struct{ Tgid, N uint32 }

// abi1Assign is the table of that weir: a function of the number of slots.
func abi1Assign(slots int) (table [4096]uint16) {
	held := make([][]uint16, slots)
	for i := range len(table) {
		held[0] = append(held[0], uint16(i*2053%len(table)))
	}
	for n := 1; n < slots; n++ {
		for range len(table) / (n + 1) {
			fullest := 0
			for s := range n {
				if len(held[s]) > len(held[fullest]) {
					fullest = s
				}
			}
			last := len(held[fullest]) - 1
			held[n] = append(held[n], held[fullest][last])
			held[fullest] = held[fullest][:last]
		}
	}
	for s, buckets := range held {
		for _, b := range buckets {
			table[b] = uint16(s)
		}
	}
	return table
}

// applyABI1 makes the pins of the world's services, with wildcard listens, as
// weir of ABI 1 would have, with the members' sockets in place.
func (w *world) applyABI1() {
	w.t.Helper()
	if errs := w.cfg.Validate(); len(errs) > 0 {
		w.t.Fatal(errs)
	}
	ns, err := netns.Current()
	if err != nil {
		w.t.Fatal(err)
	}
	defer ns.Close()
	w.locked(func(l *kernel.WriteLock) error {
		f := &abi1{w: w, l: l, ns: ns}
		if err := f.engine(); err != nil {
			return err
		}
		defer f.c.Close()
		row := uint32(0)
		for id, s := range w.cfg.Services {
			if err := f.service(s, uint32(id), row); err != nil {
				return fmt.Errorf("service %s: %w", s.Name, err)
			}
			row += uint32(s.Slots)
		}
		return nil
	})
}

type abi1 struct {
	w    *world
	l    *kernel.WriteLock
	ns   *netns.Handle
	c    *kernel.Collection
	spec *ebpf.CollectionSpec
	meta kernel.Meta
}

// engine publishes @lookup, attached.
func (f *abi1) engine() error {
	file := "testdata/abi1/steer_bpfel.o"
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		file = "testdata/abi1/steer_bpfeb.o"
	}
	object, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if f.spec, err = ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object)); err != nil {
		return err
	}
	at := map[string]kernel.Attachment{"lookup": kernel.NetnsLookup{FD: f.ns.FD(), Inode: f.ns.Inode()}}
	if kernel.ExitTracepoint.Check() == nil {
		at["exit"] = kernel.RawTracepoint{Name: "sched_process_exit"}
	}
	var programs []string
	for name := range at {
		programs = append(programs, "steer_"+name)
	}
	if f.c, err = kernel.Load(f.spec, programs, nil); err != nil {
		return err
	}
	pins := kernel.Pins{Maps: map[string]*ebpf.Map{}, Links: map[string]kernel.Link{}}
	for name, m := range f.c.Maps {
		if name, ok := strings.CutPrefix(name, "steer_"); ok {
			pins.Maps[name] = m
		}
	}
	sync, err := ebpf.NewMap(&ebpf.MapSpec{Name: "steer_sync", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer sync.Close()
	pins.Maps["sync"] = sync
	want := []string{"devices", "exits", "ports", "prefixes", "services", "sinks", "slots", "sockets", "sync", "verdicts"}
	if got := slices.Sorted(maps.Keys(pins.Maps)); len(at) == 2 && !slices.Equal(got, want) {
		return fmt.Errorf("the object has the maps %v, want %v", got, want)
	}
	for name, a := range at {
		ln, err := a.Attach(f.c.Programs["steer_"+name])
		if err != nil {
			return err
		}
		defer ln.Close()
		pins.Links[name] = ln
	}
	f.meta = kernel.Meta{ABI: 1, Object: kernel.ObjectHash(object), Inode: f.ns.Inode(), Created: time.Now(), Version: "abi1"}
	f.meta.Cookie, _ = f.ns.Cookie()
	return f.l.Publish(engineInstance(scopeOf(f.ns), EngineSkLookup), f.meta, pins)
}

// service publishes one service and admits its members.
func (f *abi1) service(s Service, id, row uint32) error {
	value := abi1Service{Seed: *s.Seed, Slots: uint32(s.Slots), Endpoints: uint32(len(s.Endpoints())),
		OnEmpty: uint32(slices.Index([]OnEmpty{Reject, Drop, Next, Pass}, s.OnEmpty)), FirstRow: row, ID: id, Bucket: abi1Assign(s.Slots)}
	inner := f.spec.Maps["steer_services"].InnerMap.Copy()
	inner.Name = "steer_service"
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Put(uint32(0), value); err != nil {
		return err
	}
	meta := f.meta
	if meta.Config, err = f.config(s, id, row); err != nil {
		return err
	}
	if err := f.l.Publish(serviceInstance(scopeOf(f.ns), s.Name), meta, kernel.Pins{Maps: map[string]*ebpf.Map{"service": m}}); err != nil {
		return err
	}
	for slot := range s.Slots {
		if err := f.admit(s, slot, row+uint32(slot)); err != nil {
			return err
		}
	}
	if err := f.c.Maps["steer_services"].Put(id, m); err != nil {
		return err
	}
	ports := map[abi1PortKey]abi1PortValue{}
	for i, ep := range s.Endpoints() {
		k := abi1PortKey{Port: ep.Port, Proto: ep.Proto}
		v := ports[k]
		if ep.Family == unix.AF_INET {
			v.Any4Service, v.Any4Endpoint = id+1, uint32(i)
		} else {
			v.Any6Service, v.Any6Endpoint = id+1, uint32(i)
		}
		ports[k] = v
	}
	for k, v := range ports {
		if err := f.c.Maps["steer_ports"].Put(k, v); err != nil {
			return err
		}
	}
	return nil
}

// config is what that weir wrote into the meta of a service: the file, with this
// service's values in place of those of the one that it was made of.
func (f *abi1) config(s Service, id, row uint32) ([]byte, error) {
	text, err := os.ReadFile("testdata/abi1/service.json")
	if err != nil {
		return nil, err
	}
	var whole map[string]any
	if err := json.Unmarshal(text, &whole); err != nil {
		return nil, err
	}
	in := whole["service"].(map[string]any)
	var listen []string
	for _, l := range s.Listen {
		listen = append(listen, l.String())
	}
	var members []any // null where there is none
	for _, m := range s.Members {
		members = append(members, map[string]any{"slot": m.Slot, "pid": m.PID})
	}
	for key, v := range map[string]any{"name": s.Name, "listen": listen, "members": members, "slots": s.Slots, "on_empty": s.OnEmpty, "seed": *s.Seed} {
		if _, ok := in[key]; !ok {
			return nil, fmt.Errorf("that weir wrote no %s", key)
		}
		in[key] = v
	}
	whole["netns"], whole["id"], whole["first_row"] = f.ns.String(), id, row
	return json.Marshal(whole)
}

func (f *abi1) admit(s Service, slot int, row uint32) error {
	m := s.Member(slot)
	if m == nil {
		return nil
	}
	a, err := m.Adopt(f.w.t.Context(), f.ns, s.Spec)
	if err != nil {
		return err
	}
	defer a.Close()
	for i, sock := range a.Sockets {
		if err := f.c.Maps["steer_sockets"].Put(row*8+uint32(i), uint64(sock.FD)); err != nil {
			return err
		}
	}
	pid := a.PIDs()[0]
	if exits := f.c.Maps["steer_exits"]; exits != nil {
		k := abi1ExitKey{Tgid: uint32(pid)}
		for exits.Update(k, row, ebpf.UpdateNoExist) != nil {
			if k.N++; k.N == 16 {
				return fmt.Errorf("process %d serves too many slots", pid)
			}
		}
	}
	start, err := pidfd.StartTime(pid)
	if err != nil {
		return err
	}
	return f.c.Maps["steer_slots"].Put(row, abi1Slot{State: 1, Tgid: uint32(pid), Since: kernel.Monotonic(), Start: start})
}
