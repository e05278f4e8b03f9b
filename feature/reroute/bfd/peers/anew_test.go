// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/internal/nstest"
)

// A device recreated while its link is dead stays down until the session is up. This holds even if the configuration
// is applied while the device is missing.
func TestDeviceAnewOfDeadLink(t *testing.T) {
	w := newWorld(t, true)
	w.acquaint()
	session := func(name, peer string) []Session {
		return []Session{{Name: name, Device: "w0", Peer: netip.MustParseAddr(peer), Interval: every, Multiplier: times / 3}}
	}
	near := Config{Netns: w.ref, Sessions: session("near", "10.9.0.2")}
	far := Config{Netns: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.there.FD()), Sessions: session("far", "10.9.0.1")}
	w.apply(near, far)
	w.run()
	defer w.stop()
	w.eventually("it is up", func() bool { return w.session("near").State == bfd.Up })
	for _, applied := range []bool{false, true} {
		w.said = nstest.Log{}
		if err := w.here.Do(func() error { return exec.CommandContext(context.Background(), "ip", "link", "del", "w0").Run() }); err != nil {
			t.Fatal(err)
		}
		w.eventually("it is down", func() bool { return w.session("near").State != bfd.Up })
		if applied {
			near.Sessions[0].Multiplier++
			w.apply(near, far)
		}
		nstest.Cable(t, w.here, "w0", w.there, "w0")
		nstest.Address(t, w.here, "w0", netip.MustParsePrefix("10.9.0.1/16")) // nobody answers at the other end
		w.eventually("the link of the new device is not used", w.dead)
		w.eventually("it is told of", func() bool { return w.said.Has("BFD session is not up again, and its link stays down", "path=near") })
		nstest.Address(t, w.there, "w0", netip.MustParsePrefix("10.9.0.2/16"))
		w.eventually("it is up again", func() bool { return w.session("near").State == bfd.Up })
		w.eventually("the link is used", func() bool { return !w.dead() })
	}
}

// dead reports whether BFD found the link down.
func (w *world) dead() bool {
	w.Helper()
	o, err := w.root.Open(engine.Published{Scope: fmt.Sprint(w.here.Inode())}.Instance(), links.MapName)
	if err != nil {
		w.Fatal(err)
	}
	defer o.Close()
	var word links.State
	if err := o.Maps[links.MapName].Lookup(links.Slot(nstest.Ifindex(w, w.here, "w0")), &word); err != nil {
		w.Fatal(err)
	}
	return word.Reasons() == links.Probe
}
