// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// A device recreated with a new or its old index has its session again without any apply.
func TestDeviceAnew(t *testing.T) {
	for name, same := range map[string]bool{"another number": false, "the same number": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, true)
			w.acquaint()
			session := func(name, peer string) []Session {
				return []Session{{Name: name, Device: "w0", Peer: netip.MustParseAddr(peer), Interval: every, Multiplier: times / 3}}
			}
			w.apply(Config{Netns: w.ref, Sessions: session("near", "10.9.0.2")},
				Config{Netns: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.there.FD()), Sessions: session("far", "10.9.0.1")})
			w.run()
			defer w.stop()
			up := func() bool { return w.session("near").State == bfd.Up && w.session("far").State == bfd.Up }
			w.eventually("both are up", up)
			a, b := nstest.Ifindex(t, w.here, "w0"), nstest.Ifindex(t, w.there, "w0")
			ip := func(ns *netns.Handle, args string) {
				t.Helper()
				if err := ns.Do(func() error {
					out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput()
					if err != nil {
						return fmt.Errorf("ip %s: %w: %s", args, err, out)
					}
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			ip(w.here, "link del w0")
			w.eventually("both are down", func() bool { return w.session("near").State != bfd.Up && w.session("far").State != bfd.Up })
			if same {
				// Both namespaces are unnamed: the pair is created in one, and the other end moves to the other with
				// its index.
				ip(w.here, fmt.Sprintf("link add w0 index %d type veth peer name w0 index %d netns /proc/%d/fd/%d", a, b, os.Getpid(), w.there.FD()))
				ip(w.here, "link set w0 up")
				ip(w.there, "link set w0 up")
				nstest.Address(t, w.here, "w0", netip.MustParsePrefix("10.9.0.1/16"))
				nstest.Address(t, w.there, "w0", netip.MustParsePrefix("10.9.0.2/16"))
			} else {
				w.cable()
			}
			if x, y := nstest.Ifindex(t, w.here, "w0"), nstest.Ifindex(t, w.there, "w0"); (x == a && y == b) != same {
				t.Fatalf("devices %d and %d were made anew as %d and %d", a, b, x, y)
			}
			w.eventually("both are up again", up)
		})
	}
}

// A session of bfdd comes up again on a recreated device, without bfdd announcing it again.
func TestDeviceAnewOfFRR(t *testing.T) {
	w := newWorld(t, true)
	near := frrtest.Start(t, w.here, "near", map[string]string{"bfdd": neighbours("10.9.0.1 10.9.0.2")}, "--dplaneaddr", "unix:{home}/dplane")
	far := frrtest.Start(t, w.there, "far", map[string]string{"bfdd": neighbours("10.9.0.2 10.9.0.1")})
	w.apply(Config{Netns: w.ref, FRR: "unix:" + near.Home + "/dplane",
		Evaluated: []Evaluated{{Name: "core", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2")}}})
	w.run()
	defer w.stop()
	up := func(r *frrtest.Router) bool {
		return strings.Contains(squeezed(r.Vtysh("show bfd peers json")), `"status":"up"`)
	}
	both := func() bool { return up(near) && up(far) && w.session("core").State == bfd.Up }
	w.eventually("both are up", both)
	before := nstest.Ifindex(t, w.here, "w0")
	if err := w.here.Do(func() error { return exec.Command("ip", "link", "del", "w0").Run() }); err != nil {
		t.Fatal(err)
	}
	w.eventually("both are down", func() bool { return !up(near) && !up(far) })
	w.cable()
	if after := nstest.Ifindex(t, w.here, "w0"); after == before {
		t.Fatalf("the device has its old number %d", after)
	}
	w.eventually("both are up again", both)
}
