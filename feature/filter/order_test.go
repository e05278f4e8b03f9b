// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Names of foreign programs. The kernel keeps 15 bytes of the long one; its BTF has the full name.
const (
	foreignShort = "cil_from_netdev"
	foreignLong  = "netobserv_ingress_flow_parse"
)

// foreign is another loader's program at tcx ingress of B's device.
type foreign struct {
	link link.Link
	id   uint32
}

// foreign attaches a program of another loader at the head or tail of the hook.
func (w *world) foreign(name string, anchor link.Anchor) foreign {
	w.t.Helper()
	spec := &ebpf.ProgramSpec{Name: name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}}
	number := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	spec.Instructions[0] = btf.WithFuncMetadata(spec.Instructions[0].WithSymbol(name),
		&btf.Func{Name: name, Type: &btf.FuncProto{Return: number}, Linkage: btf.GlobalFunc})
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		w.t.Fatal(err)
	}
	defer p.Close()
	index := nstest.Ifindex(w.t, w.B, nstest.WireDevice)
	var ln link.Link
	if err := w.B.Do(func() (err error) {
		ln, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: anchor})
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { ln.Close() })
	id, err := kernel.LinkProgram(ln)
	if err != nil {
		w.t.Fatal(err)
	}
	return foreign{ln, id}
}

func (w *world) detach(f foreign) {
	w.t.Helper()
	if err := errors.Join(f.link.(interface{ Detach() error }).Detach(), f.link.Close()); err != nil {
		w.t.Fatal(err)
	}
}

func ordered(f Filter, where hookorder.Where, anchor string) Filter {
	f.Order.Order = hookorder.Order{Where: where, Anchor: anchor}
	return f
}

// wantPosition checks the position in the state.
func (w *world) wantPosition(when, want string) {
	w.t.Helper()
	p := w.one().Attachments[0]
	for end := time.Now().Add(5 * time.Second); p.Position != nil && p.Position.String() != want && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond) // the kernel releases links of a killed process asynchronously
		p = w.one().Attachments[0]
	}
	if p.Position == nil || p.Position.String() != want || p.Problem != "" {
		w.t.Errorf("%s: position %v, %q; want %s", when, p.Position, p.Problem, want)
	}
}

func needOrder(t testing.TB) {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require(Feature{}.Needs(Config{Filters: []Filter{ordered(Filter{Hook: HookTCX}, hookorder.First, "")}})); err != nil {
		t.Skip("need: kernel", err)
	}
}

// A filter follows its order, from any order to any other, and keeps its counts. Other changes of
// the filter keep its position.
func TestOrder(t *testing.T) {
	needOrder(t)
	w := newWorld(t)
	w.foreign(foreignShort, link.Tail())
	w.foreign(foreignLong, link.Tail())
	base := w.filter(HookTCX, drops(5001))
	var passed uint64
	for _, c := range []struct {
		where        hookorder.Where
		anchor, want string
	}{
		{"", "", "3 of 3, after " + foreignLong},
		{hookorder.First, "", "1 of 3, before " + foreignShort},
		{hookorder.After, foreignShort, "2 of 3, after " + foreignShort},
		{hookorder.Last, "", "3 of 3, after " + foreignLong},
		{hookorder.Before, foreignLong, "2 of 3, after " + foreignShort},
		{hookorder.After, foreignLong[:15], "3 of 3, after " + foreignLong},
		{hookorder.Before, foreignShort, "1 of 3, before " + foreignShort},
	} {
		f := ordered(base, c.where, c.anchor)
		w.apply(f)
		w.wantPosition(f.Order.String(), c.want)
		if again := w.apply(f); len(again) > 0 {
			t.Errorf("%s: applied again: %q", f.Order, again)
		}
		f.Rules = []Rule{drops(5001), drops(5009)}
		w.apply(f)
		w.wantPosition(f.Order.String()+", rules changed", c.want)
		w.want(f.Order.String(), "5002/4 5002/6", 5001, 5002)
		passed += 2
		w.wantCounts(map[string]uint64{"p5001": passed, "p5009": 0})
	}
}

// A program attached to the wrong side of a filter stays there until the next apply moves the
// filter.
func TestOrderKept(t *testing.T) {
	needOrder(t)
	w := newWorld(t)
	f := ordered(w.filter(HookTCX, drops(5001)), hookorder.First, "")
	w.apply(f)
	w.wantPosition("alone", "the only program")
	other := w.foreign(foreignShort, link.Head())
	p := w.one().Attachments[0]
	if p.Position.String() != "2 of 2, after "+foreignShort || !strings.Contains(p.Problem, "weir apply moves it") {
		t.Errorf("behind: %s, %q", p.Position, p.Problem)
	}
	steps := w.apply(f)
	if len(steps) != 1 || !strings.Contains(steps[0], "2 of 2, after "+foreignShort+" → first") {
		t.Errorf("plan %q", steps)
	}
	w.wantPosition("moved", "1 of 2, before "+foreignShort)
	w.detach(other)
	w.wantPosition("alone again", "the only program")
}

// An order naming an absent program is rejected before any change. The error lists the present
// programs. An attached filter stays when the named program is detached.
func TestOrderWithoutAnchor(t *testing.T) {
	needOrder(t)
	w := newWorld(t)
	one := w.foreign(foreignShort, link.Tail())
	refused := func(f Filter, there string) {
		t.Helper()
		_, err := applyTo(t.Context(), w.root, f)
		if !errors.Is(err, hookorder.ErrNoAnchor) || !strings.Contains(err.Error(), there) || !strings.Contains(err.Error(), "leave order out") {
			t.Errorf("%v", err)
		}
	}
	missing := ordered(w.filter(HookTCX, drops(5001)), hookorder.After, "nobody")
	refused(missing, fmt.Sprintf("there are %d %q", one.id, foreignShort))
	if n := len(w.state().Filters); n != 0 {
		t.Errorf("%d filters", n)
	}
	f := ordered(w.filter(HookTCX, drops(5001)), hookorder.Before, foreignShort)
	w.apply(f)
	w.detach(one)
	if steps := w.apply(f); len(steps) > 0 {
		t.Errorf("the order without the anchor: %q", steps)
	}
	refused(missing, "no program is there")
	w.want("without the anchor", "5002/4 5002/6", 5001, 5002)
	w.foreign(foreignShort, link.Tail())
	w.wantPosition("with it again", "1 of 2, before "+foreignShort)
}

// A process is killed at any step of a change of order. The filter drops all the time, and the next
// command completes the change.
func TestOrderKilledAtEveryStep(t *testing.T) {
	needOrder(t)
	w := newWorld(t)
	w.foreign(foreignShort, link.Tail())
	before, after := ordered(w.filter(HookTCX, drops(5001)), hookorder.First, ""), ordered(w.filter(HookTCX, drops(5001)), hookorder.Last, "")
	var seen []string
	for n := 0; ; n += nstest.Stride(1) {
		w.apply(before)
		step := w.crash(n, after)
		if step == "" {
			break
		}
		seen = append(seen, step)
		w.want("killed at "+step, "5002/4 5002/6", 5001, 5002)
		w.apply(after)
		w.wantPosition("after "+step, "2 of 2, after "+foreignShort)
	}
	if !slices.Contains(seen, "upgrade:staged") {
		t.Errorf("killed only at steps %q", seen)
	}
}
