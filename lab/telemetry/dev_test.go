package telemetry

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

func TestMain(m *testing.M) { lab.Enter(); os.Exit(m.Run()) }

func TestDev(t *testing.T) {
	peers.Extra = os.Getenv("EXTRA")
	rate, _ := strconv.ParseFloat(os.Getenv("RATE"), 64)
	e, err := lab.NewEnv(lab.Smoke, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { e.Close() }()
	w, err := rig.NewWorld(e, 0)
	if err != nil {
		t.Fatal(err)
	}
	c, err := peers.NewCollector(e, w.Collectors.Name, 0, rig.Port, 130)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(7 * time.Second)
	f, err := routers.New(routers.Config{Devices: 128, First4: rig.Devices4.Addr().Next(), First6: rig.Devices6.Addr().Next(),
		To4: netip.AddrPortFrom(rig.Service4, rig.Port), To6: netip.AddrPortFrom(rig.Service6, rig.Port), Rate: rate, Records: 3, Refresh: 20, Retry: time.Second, NS: w.Routers.Handle, Ramp: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	f.Start(context.Background())
	n := uint32(10)
	for range n {
		time.Sleep(2 * time.Second)
		f.Advance()
	}
	time.Sleep(12 * time.Second)
	type k struct {
		kind peers.Kind
		ep   uint32
		a    netip.Addr
	}
	got := map[k]int{}
	lines := map[k]string{}
	c.Poll(func(r peers.Record) {
		got[k{r.Kind, r.Epoch, r.Device}] += r.Count
		lines[k{r.Kind, r.Epoch, r.Device}] += fmt.Sprint(r.Count, " ")
		if r.Kind == peers.Odd {
			fmt.Println(r.Text)
		}
	})
	bad, tot := 0, 0
	for i, d := range f.Devices {
		for ep := uint32(1); ep <= n; ep++ {
			if g, s := got[k{peers.Flows, ep, d.Addr}], f.Sent(routers.IPFIX, i, ep); g != s {
				fmt.Println(d.Addr, ep, "ipfix", g, s, lines[k{peers.Flows, ep, d.Addr}])
				bad++
			} else {
				tot += s
			}
			if g, s := got[k{peers.Route, ep, d.Addr}], f.Sent(routers.BMP, i, ep); g != s {
				fmt.Println(d.Addr, ep, "bmp", g, s)
				bad++
			}
		}
	}
	fmt.Println("bad", bad, "of records", tot)
	f.Stop()
}
