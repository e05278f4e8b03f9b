// SPDX-License-Identifier: Apache-2.0

package loaders

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/lab"
)

// hookName is a hook used by weir.
type hookName string

const (
	hookXDP     hookName = "xdp"
	hookIngress hookName = "tcx-ingress"
	hookEgress  hookName = "tcx-egress"
	hookLookup  hookName = "sk_lookup"
)

// loader is a foreign loader of BPF programs.
type loader struct {
	name  string
	tool  string // required program; "": the lab itself
	hooks []hookName
	// at returns the foreign hook for one of weir's: the same one, or the nearest supported by the loader.
	at     func(hookName) hookName
	load   func(ctx context.Context, w *world, at hookName) error
	unload func(ctx context.Context, w *world, at hookName) error
}

func same(h hookName) hookName { return h }

// loaders are three loaders with three of weir's hooks each. xdp-loader supports XDP alone, for any hook of
// weir. tc's filters are at clsact, beside weir's at tcx of the same direction; at XDP its companion ip
// loads. cilium/ebpf also attaches at sk_lookup.
var loaders = []loader{
	{name: "ebpf", hooks: []hookName{hookXDP, hookIngress, hookLookup}, at: same, load: loadLink, unload: endLink},
	{name: "xdp-loader", tool: "xdp-loader", hooks: []hookName{hookXDP, hookIngress, hookEgress},
		at: func(hookName) hookName { return hookXDP }, load: loadXDP, unload: unloadXDP},
	{name: "tc", tool: "tc", hooks: []hookName{hookXDP, hookIngress, hookEgress}, at: same, load: loadTC, unload: unloadTC},
}

// exclusive reports whether weir and the loader compete for the one attachment at XDP.
func (l loader) exclusive(h hookName) bool { return h == hookXDP && l.at(h) == hookXDP }

// tool runs a program in the namespace.
func (w *world) tool(ctx context.Context, path string, args ...string) error {
	var out bytes.Buffer
	p, err := w.env.Start(lab.Command{Namespace: w.name, Path: path, Args: args, Output: &out, Timeout: time.Minute})
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := p.Err(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", filepath.Base(path), strings.Join(args, " "), err, strings.TrimSpace(out.String()))
	}
	return nil
}

// loadLink starts a process with a link of cilium/ebpf, and waits until it is attached.
func loadLink(ctx context.Context, w *world, at hookName) error {
	var out bytes.Buffer
	p, err := w.env.Start(lab.Command{Namespace: w.name, Path: w.env.Self(), Args: []string{holdArg, string(at), device}, Output: &out})
	if err != nil {
		return err
	}
	err = w.wait(ctx, func(all []program) (bool, error) {
		if !p.Running() {
			return false, fmt.Errorf("the loader ended: %v: %s", p.Err(), strings.TrimSpace(out.String()))
		}
		return count(all, theirs) > 0, nil
	})
	if err == nil {
		w.holder = p
	}
	return err
}

// endLink ends this process. The kernel ends links without pins some time later.
func endLink(ctx context.Context, w *world, _ hookName) error {
	if w.holder == nil {
		return nil
	}
	if err := w.holder.Signal(unix.SIGTERM); err != nil {
		return err
	}
	<-w.holder.Done()
	w.holder = nil
	return w.wait(ctx, func(all []program) (bool, error) { return count(all, theirs) == 0, nil })
}

func loadXDP(ctx context.Context, w *world, _ hookName) error {
	return w.tool(ctx, "xdp-loader", "load", "-m", "native", "-s", "xdp", device, w.object)
}

func unloadXDP(ctx context.Context, w *world, _ hookName) error {
	return w.tool(ctx, "xdp-loader", "unload", device, "--all")
}

// tcDirection holds tc's names of directions.
var tcDirection = map[hookName]string{hookIngress: "ingress", hookEgress: "egress"}

func loadTC(ctx context.Context, w *world, at hookName) error {
	if at == hookXDP {
		return w.tool(ctx, "ip", "link", "set", "dev", device, "xdpdrv", "obj", w.object, "sec", "xdp")
	}
	if err := w.tool(ctx, "tc", "qdisc", "add", "dev", device, "clsact"); err != nil {
		return err
	}
	return w.tool(ctx, "tc", "filter", "add", "dev", device, tcDirection[at], "pref", "77", "protocol", "all", "bpf", "da", "obj", w.object, "sec", "tc")
}

// unloadTC removes tc's qdisc with all filters, like scripts do.
func unloadTC(ctx context.Context, w *world, at hookName) error {
	if at == hookXDP {
		return w.tool(ctx, "ip", "link", "set", "dev", device, "xdpdrv", "off")
	}
	return w.tool(ctx, "tc", "qdisc", "del", "dev", device, "clsact")
}
