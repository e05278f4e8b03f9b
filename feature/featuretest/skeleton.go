// SPDX-License-Identifier: Apache-2.0

// Package featuretest is a minimal feature. Tests of host and cmd/weir run it like any other feature, and new features
// start as a copy of it.
//
// weir.yaml:
//
//	skeleton:
//	  - {name: web, cgroup: /system.slice/nginx.service}
package featuretest

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
	"github.com/weir-project/weir/kernel/probe"
)

// Name is the pin directory, metric prefix, configuration key and command.
const Name = "skeleton"

// Object stands for the embedded BPF object. Tests change it to simulate another version of weir.
var Object = []byte("skeleton 1")

// Item is an entry of the section: it counts the packets of a cgroup.
type Item struct {
	Name   string `yaml:"name" json:"name"`
	Cgroup string `yaml:"cgroup" json:"cgroup"` // cgroup of version 2, relative to its root
}

// View is an item as shown by weir status.
type View struct {
	Name    string `json:"name" table:"SKELETON" label:"name"`
	Cgroup  string `json:"cgroup" table:"CGROUP"`
	Packets uint64 `json:"packets" table:"PACKETS" metric:"packets_total" help:"Packets that processes of the cgroup received."`
}

// Pins of an instance.
const (
	countMap   = "count"
	cgroupLink = "cgroup"
)

// Feature counts packets of cgroups.
type Feature struct{ feature.Set[Item, View] }

// New returns the feature.
func New() Feature {
	f := Feature{feature.Set[Item, View]{
		Store:   instances.Store[Item]{Feature: Name, ABI: 1, Object: func() []byte { return Object }},
		NameOf:  func(i Item) string { return i.Name },
		NeedsOf: func([]Item) []kernel.Need { return []kernel.Need{probe.CgroupIngress} },
	}}
	f.Reconcile, f.View = f.reconcile, f.view
	return f
}

// Declare returns the feature for host's list.
func Declare() feature.Declared {
	return feature.Declare[[]Item, feature.SetState[Item, View]](New())
}

// reconcile keeps the counters of an instance. The new program runs before the old one stops: no packet is missed.
func (f Feature) reconcile(l *kernel.WriteLock, i kernel.Instance, _ *netns.Handle, item Item) error {
	root, err := units.CgroupRoot()
	if err != nil {
		return err
	}
	at := kernel.Cgroup{Path: filepath.Join(root, item.Cgroup), Hook: ebpf.AttachCGroupInetIngress}
	old, err := f.Store.Open(l, i)
	if err != nil && !errors.Is(err, kernel.ErrNotExist) {
		return err
	}
	share := map[string]*ebpf.Map{}
	if err == nil {
		defer old.Close()
		share = old.Pins.Maps
	}
	c, err := kernel.Load(spec(), []string{"skeleton"}, share)
	if err != nil {
		return err
	}
	defer c.Close()
	form := instances.Form[Item]{Spec: item, Pins: kernel.Pins{Maps: map[string]*ebpf.Map{countMap: c.Maps[countMap]}}}
	if old != nil && old.Spec == item {
		if ln, lerr := old.Pins.Link(cgroupLink); lerr == nil {
			defer ln.Close()
			if at.Verify(ln) == nil {
				return f.Store.Exchange(l, i, form, []string{cgroupLink}, func() error { return kernel.MoveLink(ln, c.Programs["skeleton"]) })
			}
		}
	}
	ln, err := at.Attach(c.Programs["skeleton"])
	if err != nil {
		return err
	}
	defer ln.Close()
	kernel.Step("skeleton:attached")
	form.Pins.Links = map[string]kernel.Link{cgroupLink: ln}
	return f.Store.Publish(l, i, form)
}

func (f Feature) view(r *kernel.Root, rec instances.Record[Item]) (View, error) {
	v := View{Name: rec.Name, Cgroup: rec.Spec.Cgroup}
	use, err := f.Store.Open(r, rec.Instance)
	if err != nil {
		return v, err
	}
	defer use.Close()
	return v, use.Pins.Maps[countMap].Lookup(uint32(0), &v.Packets)
}

// Explain implements feature.Explainer.
func (f Feature) Explain(ctx context.Context, r *kernel.Root, _ feature.Packet) (out []feature.Verdict, err error) {
	st, err := f.State(ctx, r)
	for _, v := range st.Items {
		out = append(out, feature.Verdict{Stage: feature.StageSocket, ExplainStep: feature.ExplainStep{Step: Name + " " + v.Name, Text: fmt.Sprintf("counts it, if the socket is of cgroup %s", v.Cgroup)}})
	}
	return out, err
}

// spec returns a program that counts and passes packets: count[0]++; return 1.
func spec() *ebpf.CollectionSpec {
	return &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{countMap: {Name: countMap, Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}},
		Programs: map[string]*ebpf.ProgramSpec{"skeleton": {Name: "skeleton", Type: ebpf.CGroupSKB, AttachType: ebpf.AttachCGroupInetIngress, License: "Dual BSD/GPL",
			Instructions: asm.Instructions{
				asm.StoreImm(asm.R10, -4, 0, asm.Word),
				asm.LoadMapPtr(asm.R1, 0).WithReference(countMap),
				asm.Mov.Reg(asm.R2, asm.R10),
				asm.Add.Imm(asm.R2, -4),
				asm.FnMapLookupElem.Call(),
				asm.JEq.Imm(asm.R0, 0, "pass"),
				asm.Mov.Imm(asm.R1, 1),
				asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
				asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"),
				asm.Return(),
			}}},
	}
}
