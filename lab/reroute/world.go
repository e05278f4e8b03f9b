// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/reroute"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// world is a triangle of routers with a host at either side: s – r1 – r2 – d, and r1 – r3 – r2. Two links
// connect r1 and r2: the protected main one, with probes every 10 ms, and a second one, with probes every 5
// ms.
type world struct {
	env              *lab.Env
	root             *kernel.Root
	s, r1, r2, r3, d *netns.Handle
	names            map[*netns.Handle]string
	main, second     *cutter
}

func newWorld(ctx context.Context, e *lab.Env) (w *world, err error) {
	w = &world{env: e, root: kernel.OpenRoot(e.Root), names: map[*netns.Handle]string{}}
	for name, n := range map[string]**netns.Handle{"s": &w.s, "r1": &w.r1, "r2": &w.r2, "r3": &w.r3, "d": &w.d} {
		var full string
		if *n, full, err = e.Namespace(name); err != nil {
			return nil, err
		}
		w.names[*n] = full
		for _, v := range []string{"net.ipv6.conf.all.forwarding", "net.ipv6.conf.all.seg6_enabled", "net.ipv6.conf.default.seg6_enabled"} {
			if err := topo.Sysctl(*n, v, "1"); err != nil {
				return nil, err
			}
		}
	}
	end := func(ns *netns.Handle, name, addr string) topo.End {
		return topo.End{NS: ns, Name: name, Addrs: []netip.Prefix{netip.MustParsePrefix(addr)}}
	}
	for _, c := range [][2]topo.End{
		{end(w.s, "out", "fd00:a::2/64"), end(w.r1, "in", "fd00:a::1/64")},
		{end(w.r1, "r12", "fd00:12::1/64"), end(w.r2, "r21", "fd00:12::2/64")},
		{end(w.r1, "p12", "fd00:22::1/64"), end(w.r2, "p21", "fd00:22::2/64")},
		{end(w.r1, "r13", "fd00:13::1/64"), end(w.r3, "r31", "fd00:13::3/64")},
		{end(w.r3, "r32", "fd00:32::3/64"), end(w.r2, "r23", "fd00:32::2/64")},
		{end(w.r2, "out", "fd00:d::1/64"), end(w.d, "in", "fd00:d::2/64")},
	} {
		if err := topo.Cable(c[0], c[1]); err != nil {
			return nil, err
		}
	}
	for ns, routes := range map[*netns.Handle][]string{
		w.s:  {"default via fd00:a::1"},
		w.d:  {"default via fd00:d::1"},
		w.r1: {"fc00:3::/32 via fd00:13::3", "fd00:d::/64 via fd00:12::2"},
		w.r2: {"fc00:3::/32 via fd00:32::3", "fd00:a::/64 via fd00:12::1", "fc00:2::d6/128 encap seg6local action End.DT6 table main dev r23"},
		w.r3: {"fc00:2::/32 via fd00:32::2", "fd00:d::/64 via fd00:32::2", "fd00:a::/64 via fd00:13::1", "fc00:3::e/128 encap seg6local action End dev r32"},
	} {
		for _, r := range routes {
			if err := ns.Do(func() error { return run("ip", append([]string{"-6", "route", "add"}, strings.Fields(r)...)...) }); err != nil {
				return nil, err
			}
		}
	}
	if w.main, err = newCutter(e, [2]*netns.Handle{w.r1, w.r2}, [2]string{"r12", "r21"}); err != nil {
		return nil, err
	}
	w.second, err = newCutter(e, [2]*netns.Handle{w.r1, w.r2}, [2]string{"p12", "p21"})
	return w, err
}

func run(program string, args ...string) error {
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, out)
	}
	return nil
}

// Sessions' numbers on the wire.
const (
	idMain   = 10
	idSecond = 5
)

// configure sets up weir to probe both links from both ends, and to protect the main one.
func (w *world) configure(ctx context.Context) error {
	key := filepath.Join(w.env.Dir, "key")
	if err := os.WriteFile(key, []byte(fmt.Sprintf("%016x", time.Now().UnixNano())), 0o600); err != nil {
		return err
	}
	// A link is up again after 100 ms without a failure, despite frequent failures: the tests cut it often.
	probe := func(id int, interval, peer, via, source, function string) string {
		return fmt.Sprintf("probe: {id: %d, interval: %s, peer: %s, via: %s, source: %s, function: %s, key_file: %s, stable_for: 100ms, stable_max: 100ms}",
			id, interval, peer, via, source, function, key)
	}
	text := strings.NewReplacer("R1", w.names[w.r1], "R2", w.names[w.r2]).Replace(`
reroute:
  - {name: main, netns: R1, interface: r12, repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: "fd00:13::3"}], ` + probe(idMain, "10ms", "fc00:2::bf", "fd00:12::2", "fd00:12::1", "fc00:1::bf") + `}
  - {name: main, netns: R2, interface: r21, repairs: [{interface: r23, via: "fd00:32::3"}], ` + probe(idMain, "10ms", "fc00:1::bf", "fd00:12::1", "fd00:12::2", "fc00:2::bf") + `}
  - {name: second, netns: R1, interface: p12, ` + probe(idSecond, "5ms", "fc00:22::bf", "fd00:22::2", "fd00:22::1", "fc00:11::bf") + `}
  - {name: second, netns: R2, interface: p21, ` + probe(idSecond, "5ms", "fc00:11::bf", "fd00:22::1", "fd00:22::2", "fc00:22::bf") + `}
`)
	var file struct {
		Reroute []reroute.Path `yaml:"reroute"`
	}
	if err := strictyaml.Decode("reroute.yaml", []byte(text), &file); err != nil {
		return err
	}
	c := reroute.Config{Paths: file.Reroute}
	if errs := c.Validate(); len(errs) > 0 {
		return errors.Join(errs...)
	}
	l, err := w.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	st, err := reroute.ReadState(ctx, w.root)
	if err != nil {
		return err
	}
	p, err := reroute.Feature{}.Plan(ctx, st, c)
	if err != nil {
		return err
	}
	w.env.OnClose(func() {
		l, err := w.root.Lock(context.Background())
		if err != nil {
			return
		}
		defer l.Unlock()
		_ = reroute.Feature{}.Remove(context.Background(), l)
	})
	return p.Apply(ctx, l, nil)
}

// all waits until ok is true for each session of either end.
func (w *world) all(ctx context.Context, what string, ok func(s liveness.SessionState) bool) error {
	for end := time.Now().Add(60 * time.Second); ; {
		st, err := liveness.ReadState(ctx, w.root)
		if err != nil {
			return err
		}
		good := len(st.Sessions) == 4
		for _, s := range st.Sessions {
			good = good && ok(s)
		}
		if good {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("timeout after 60 s, waiting until %s: %v", what, st.Sessions)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func up(s liveness.SessionState) bool { return s.Phase == liveness.Up }
