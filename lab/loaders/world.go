// SPDX-License-Identifier: Apache-2.0

package loaders

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/loaders/bpf"
	"github.com/weir-project/weir/lab/rig"
)

// device is the interface of all attachments.
const device = "eth0"

// side is the owner of a program.
type side string

const (
	ours   side = "ours"
	theirs side = "theirs"
)

// program is an attached program.
type program struct {
	hook string
	name string
	id   uint32
}

// weirs are the names of weir's programs at the hooks of the experiment.
var weirs = []string{"filter", "steer_lookup", "steer_dispatch"}

func (p program) side() side {
	if slices.Contains(weirs, p.name) {
		return ours
	}
	return theirs
}

func count(all []program, s side) (n int) {
	for _, p := range all {
		if p.side() == s {
			n++
		}
	}
	return n
}

// world is a namespace with a device, weir and a loader.
type world struct {
	env    *lab.Env
	ns     *netns.Handle
	name   string
	index  int
	object string // input file of loaders
	weir   *rig.Weir
	serve  *lab.Process
	holder *lab.Process // of a link of cilium/ebpf
}

func newWorld(e *lab.Env) (w *world, err error) {
	w = &world{env: e, object: filepath.Join(e.Dir, "pass.o")}
	if err := os.WriteFile(w.object, bpf.Object(), 0o644); err != nil {
		return nil, err
	}
	e.OnClose(tidy())
	if w.ns, w.name, err = e.Namespace("host"); err != nil {
		return nil, err
	}
	err = w.ns.Do(func() error {
		v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: "peer"}
		if err := errors.Join(netlink.LinkAdd(v), netlink.LinkSetUp(v)); err != nil {
			return err
		}
		l, err := netlink.LinkByName(device)
		if err == nil {
			w.index = l.Attrs().Index
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", device, err)
	}
	if w.weir, err = rig.NewWeirFrom(e, "services: {}\n"); err != nil {
		return nil, err
	}
	return w, w.start()
}

// tidy returns a function to remove directories of xdp-loader and iproute2 from the BPF file system. Both
// leave them there. Directories with pins, and earlier ones, stay.
func tidy() func() {
	var made []string
	for _, name := range []string{"xdp", "ip", "tc"} {
		dir := filepath.Join("/sys/fs/bpf", name)
		if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
			made = append(made, dir)
		}
	}
	return func() {
		for _, dir := range made {
			var dirs []string
			_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return nil
			})
			for _, d := range slices.Backward(dirs) {
				_ = os.Remove(d)
			}
			_ = os.Remove(dir) // iproute2's ip is a symbolic link
		}
	}
}

// config returns weir's file for a hook.
func (w *world) config(h hookName) string {
	filter := func(hook, more string) string {
		return fmt.Sprintf("filter:\n  - {name: lab, netns: %s, hook: %s, interfaces: [%s]%s, rules: [{match: 'udp.dstport == 9', action: count}]}\n", w.name, hook, device, more)
	}
	switch h {
	case hookXDP:
		return filter("xdp", "")
	case hookIngress:
		return filter("tcx", ", order: first")
	case hookEgress:
		return filter("tcx", ", direction: egress, order: last")
	}
	return fmt.Sprintf("services:\n  lab: {netns: %s, listen: [\"udp :4739\"], steer: {slots: 1}}\n", w.name)
}

// start starts weir serve.
func (w *world) start() (err error) {
	w.serve, err = w.weir.Serve()
	return err
}

// restart restarts weir serve and applies the file again.
func (w *world) restart(ctx context.Context) error {
	if err := w.serve.Signal(unix.SIGTERM); err != nil {
		return err
	}
	select {
	case <-w.serve.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := w.start(); err != nil {
		return err
	}
	return w.weir.Apply(ctx)
}

// programs returns all programs attached at the hooks of the experiment.
func (w *world) programs() (out []program, err error) {
	add := func(hook string, ids ...uint32) {
		for _, id := range ids {
			out = append(out, program{hook, hookorder.Read(id).Name, id})
		}
	}
	err = w.ns.Do(func() error {
		l, err := netlink.LinkByIndex(w.index)
		if err != nil {
			return err
		}
		if x := l.Attrs().Xdp; x != nil && x.Attached {
			add("xdp", x.ProgId)
		}
		for name, q := range map[string]link.QueryOptions{
			"tcx ingress": {Target: w.index, Attach: ebpf.AttachTCXIngress},
			"tcx egress":  {Target: w.index, Attach: ebpf.AttachTCXEgress},
			"sk_lookup":   {Target: w.ns.FD(), Attach: ebpf.AttachSkLookup},
		} {
			all, _, err := hookorder.List(q, 0)
			if err != nil {
				return fmt.Errorf("programs at %s: %w", name, err)
			}
			for _, p := range all {
				add(name, p.ID)
			}
		}
		for name, parent := range map[string]uint32{"tc ingress": netlink.HANDLE_MIN_INGRESS, "tc egress": netlink.HANDLE_MIN_EGRESS} {
			all, err := dump.FilterList(l, parent)
			if err != nil {
				return fmt.Errorf("filters at %s: %w", name, err)
			}
			for _, f := range all {
				if b, ok := f.(*netlink.BpfFilter); ok {
					add(name, uint32(b.Id))
				}
			}
		}
		return nil
	})
	return out, err
}

// wait polls until the programs are the wanted ones.
func (w *world) wait(ctx context.Context, wanted func([]program) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		all, err := w.programs()
		if err != nil {
			return err
		}
		if ok, err := wanted(all); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("programs are %v: %w", all, ctx.Err())
		}
	}
}
