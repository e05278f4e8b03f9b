// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/topo"
)

// bfdSide is a router with kernel BFD. Daemons independent of weir are at the other ends of its links.
type bfdSide struct {
	ns       *netns.Handle
	engine   *engine.Engine
	sessions []engine.Session
	names    []string // of the daemons
	echoing  *echoing // nil: bfdd is not installed
	links    byte
}

// Intervals of these sessions. They are long, because daemons are processes and this machine delays them
// for tens of milliseconds.
const (
	bfdInterval   = 100 * time.Millisecond
	bfdMultiplier = 5
)

// wanted returns the number of installed daemons.
func (b *bfdSide) wanted() int { return len(b.sessions) }

// startCommand returns the command of a daemon at one end of a link.
type startCommand func(home, namespace string, here, there netip.Addr) (lab.Command, error)

// startBFD starts the installed daemons, and the kernel's ends of the sessions.
func (x *experiment) startBFD(ctx context.Context) (*bfdSide, error) {
	b := &bfdSide{}
	var err error
	if b.ns, _, err = x.env.Namespace("bfd"); err != nil {
		return nil, err
	}
	for _, d := range []struct {
		name, program string
		start         startCommand
	}{{"bfdd", "bfdd", bfddCommand}, {"bird", "bird", birdCommand}, {"echo", "bfdd", bfddCommand}} {
		if _, err := lab.Find(d.program); err != nil {
			x.result.Skip("BFD with %s: %v", d.name, err)
			continue
		}
		n, err := x.neighbour(b, d.name, d.start)
		if err != nil {
			return nil, err
		}
		if d.name == "echo" {
			if b.echoing, err = newEchoing(x.env, b.ns, n); err != nil {
				return nil, err
			}
			continue
		}
		b.names, b.sessions = append(b.names, d.name), append(b.sessions, n.session)
	}
	if b.engine, err = engine.Open(ctx, x.world.root, b.ns, bfdInterval/20); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ran := make(chan struct{})
	go func() {
		b.engine.Run(ctx, func(err error) { x.say("BFD: %v", err) })
		close(ran)
	}()
	x.env.OnClose(func() {
		cancel()
		<-ran
		b.engine.Close()
		l, err := x.world.root.Lock(context.Background())
		if err != nil {
			return
		}
		defer l.Unlock()
		_ = engine.Remove(l)
	})
	all := b.sessions
	if b.echoing != nil {
		all = append(slices.Clone(all), b.echoing.session)
	}
	return b, b.engine.Put(ctx, all...)
}

// neighbour is the router at the other end of a link; its device is w0.
type neighbour struct {
	ns      *netns.Handle
	device  string         // of this end
	session engine.Session // this end's
}

// neighbour starts a daemon at the other end of a new link.
func (x *experiment) neighbour(b *bfdSide, name string, start startCommand) (n neighbour, err error) {
	far, namespace, err := x.env.Namespace("bfd-" + name)
	if err != nil {
		return n, err
	}
	b.links++
	here, there := netip.AddrFrom4([4]byte{10, 98, b.links, 1}), netip.AddrFrom4([4]byte{10, 98, b.links, 2})
	n = neighbour{ns: far, device: fmt.Sprint("b", b.links)}
	err = topo.Cable(topo.End{NS: b.ns, Name: n.device, Addrs: []netip.Prefix{netip.PrefixFrom(here, 24)}},
		topo.End{NS: far, Name: "w0", Addrs: []netip.Prefix{netip.PrefixFrom(there, 24)}})
	if err != nil {
		return n, err
	}
	if err := x.daemon(name, namespace, there, here, start); err != nil {
		return n, err
	}
	index, err := deviceIndex(b.ns, n.device)
	n.session = engine.Session{Config: bfd.Config{Discriminator: 0x1000 + uint32(b.links), Multiplier: bfdMultiplier, DesiredTx: bfdInterval, RequiredRx: bfdInterval},
		Local: here, Peer: there, Ifindex: index, SourcePort: bfd.FirstSourcePort + uint16(b.links)}
	return n, err
}

func deviceIndex(ns *netns.Handle, device string) (index int, err error) {
	err = ns.Do(func() error {
		d, err := net.InterfaceByName(device)
		if err == nil {
			index = d.Index
		}
		return err
	})
	return index, err
}

// daemon starts a daemon.
func (x *experiment) daemon(kind, namespace string, here, there netip.Addr, command startCommand) error {
	home := filepath.Join(x.env.Dir, kind)
	if err := errors.Join(os.MkdirAll(home, 0o777), os.Chmod(home, 0o777)); err != nil { // FRR runs as a separate user
		return err
	}
	c, err := command(home, namespace, here, there)
	if err != nil {
		return err
	}
	out, err := os.Create(filepath.Join(home, "out"))
	if err != nil {
		return err
	}
	defer out.Close()
	c.Namespace, c.Dir, c.Output = namespace, home, out
	_, err = x.env.Start(c)
	return err
}

func bfddCommand(home, _ string, here, there netip.Addr) (lab.Command, error) {
	file := func(name string) string { return filepath.Join(home, name) }
	config := fmt.Sprintf("bfd\n peer %s local-address %s\n  detect-multiplier %d\n  receive-interval %d\n  transmit-interval %d\n  echo receive-interval %d\n  no shutdown\n exit\nexit\n",
		there, here, bfdMultiplier, bfdInterval.Milliseconds(), bfdInterval.Milliseconds(), echoInterval.Milliseconds())
	return lab.Command{Path: "bfdd", Args: []string{"-f", file("bfdd.conf"), "-i", file("pid"), "-z", file("zserv"), "--vty_socket", home, "-P", "0", "--bfdctl", file("ctl")}},
		os.WriteFile(file("bfdd.conf"), []byte(config), 0o644)
}

func birdCommand(home, _ string, here, there netip.Addr) (lab.Command, error) {
	file := func(name string) string { return filepath.Join(home, name) }
	config := fmt.Sprintf("router id %s;\nprotocol device {}\nprotocol bfd {\n interface \"w0\" { interval %d ms; multiplier %d; };\n neighbor %s dev \"w0\";\n}\n",
		here, bfdInterval.Milliseconds(), bfdMultiplier, there)
	return lab.Command{Path: "bird", Args: []string{"-f", "-c", file("bird.conf"), "-s", file("ctl"), "-P", file("pid")}},
		os.WriteFile(file("bird.conf"), []byte(config), 0o644)
}

// interop checks the BFD sessions, after enough time to fail.
func (x *experiment) interop(ctx context.Context, begin time.Time) error {
	if left := x.talk - time.Since(begin); left > 0 {
		x.say("BFD sessions must stay up for another %s", left.Round(time.Second))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(left):
		}
	}
	peers, flaps := 0, uint64(0)
	for i, s := range x.bfd.sessions {
		st, there, err := x.bfd.engine.Status(s.Discriminator)
		if err != nil {
			return err
		}
		if there && st.State == bfd.Up {
			peers++
		}
		flaps += st.Downs
		x.result.Note("BFD with %s: %s, down %d times, %d packets in, %d out, every %s", x.bfd.names[i], st.State, st.Downs, st.In, st.Out, st.Interval)
	}
	x.result.Set("bfd_interop_peers", float64(peers))
	x.result.Set("bfd_interop_flaps", float64(flaps))
	x.result.Set("bfd_interop_interval_ms", float64(bfdInterval.Milliseconds()))
	x.result.Set("bfd_interop_multiplier", bfdMultiplier)
	return nil
}
