// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/internal/nstest"
)

// twoPrograms is an object with three maps, used in part by each program.
func twoPrograms() *ebpf.CollectionSpec {
	lookup := func(names ...string) *ebpf.ProgramSpec {
		var ins asm.Instructions
		for _, n := range names {
			ins = append(ins, asm.LoadMapPtr(asm.R1, 0).WithReference(n))
		}
		return &ebpf.ProgramSpec{Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "Dual BSD/GPL",
			Instructions: append(ins, asm.Mov.Imm(asm.R0, 1), asm.Return())}
	}
	array := func(name string) *ebpf.MapSpec {
		return &ebpf.MapSpec{Name: name, Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}
	}
	return &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{"a": array("a"), "b": array("b"), "c": array("c")},
		Programs: map[string]*ebpf.ProgramSpec{
			"uses_a":  lookup("a"),
			"uses_ab": lookup("a", "b"),
			"bad": {Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "Dual BSD/GPL",
				Instructions: asm.Instructions{asm.Mov.Reg(asm.R0, asm.R9), asm.Return()}},
		},
	}
}

func TestLoadTakesOnlyWhatIsUsed(t *testing.T) {
	nstest.NeedRoot(t)
	for _, c := range []struct{ programs, maps []string }{
		{[]string{"uses_a"}, []string{"a"}},
		{[]string{"uses_ab"}, []string{"a", "b"}},
		{[]string{"uses_a", "uses_ab"}, []string{"a", "b"}},
	} {
		spec := twoPrograms()
		got, err := Load(spec, c.programs, nil)
		if err != nil {
			t.Errorf("%v: %v", c.programs, err)
			continue
		}
		programs, names := slices.Sorted(maps.Keys(got.Programs)), slices.Sorted(maps.Keys(got.Maps))
		if !slices.Equal(programs, c.programs) || !slices.Equal(names, c.maps) {
			t.Errorf("%v: loaded programs %v and maps %v, want maps %v", c.programs, programs, names, c.maps)
		}
		got.Close()
		if len(spec.Programs) != 3 || len(spec.Maps) != 3 {
			t.Errorf("%v: the caller's spec was changed", c.programs)
		}
	}
}

func TestLoadSharesMaps(t *testing.T) {
	nstest.NeedRoot(t)
	m, err := newMap()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c, err := Load(twoPrograms(), []string{"uses_ab"}, map[string]*ebpf.Map{"b": m})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if want, got := mapID(t, m), mapID(t, c.Maps["b"]); got != want {
		t.Errorf("map %d was loaded, want the shared %d", got, want)
	}
	if mapID(t, c.Maps["a"]) == mapID(t, m) {
		t.Error("both maps are the shared one")
	}
}

func mapID(t *testing.T, m *ebpf.Map) ebpf.MapID {
	t.Helper()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, ok := info.ID()
	if !ok {
		t.Fatal("the kernel gives no id")
	}
	return id
}

func TestLoadErrors(t *testing.T) {
	nstest.NeedRoot(t)
	for program, want := range map[string]string{
		"bad":    "load bad: rejected by the kernel's verifier",
		"absent": "no program absent in the object",
	} {
		c, err := Load(twoPrograms(), []string{program}, nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v; want an error that says %q", program, c, err, want)
		}
	}
}

type counters struct {
	Packets uint64
	_       [4]byte
	State   uint32 // not a counter: not summed
	Bytes   uint64
}

func TestSumPerCPU(t *testing.T) {
	nstest.NeedRoot(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 24, MaxEntries: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	shares := make([]counters, ebpf.MustPossibleCPU())
	var want counters
	for i := range shares {
		shares[i] = counters{Packets: uint64(i + 1), State: 7, Bytes: 1 << (40 + i%8)}
		want.Packets += shares[i].Packets
		want.Bytes += shares[i].Bytes
	}
	for key := range uint32(2) {
		if err := m.Put(key, shares); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(key uint32, want counters) {
		t.Helper()
		if got, err := SumPerCPU[counters](m, key); err != nil || got != want {
			t.Errorf("element %d sums up to %+v, %v; want %+v", key, got, err, want)
		}
	}
	expect(0, want)
	if err := ZeroPerCPU[counters](m, 0); err != nil {
		t.Error(err)
	}
	expect(0, counters{})
	expect(1, want)
	if _, err := SumPerCPU[counters](m, 2); err == nil || !strings.Contains(err.Error(), "counters 2") {
		t.Errorf("beyond the end: %v", err)
	}
}
