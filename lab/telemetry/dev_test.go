package telemetry

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
	"net/netip"
)

func TestMain(m *testing.M) { lab.Enter(); os.Exit(m.Run()) }

func TestDev(t *testing.T) {
	e, err := lab.NewEnv(lab.Smoke, 1)
	if err != nil { t.Fatal(err) }
	defer func() { e.Close(); t.Log("left", e.Leftovers()) }()
	w, err := newWorld(e, 0)
	if err != nil { t.Fatal(err) }
	c, err := peers.NewCollector(e, w.collectors.name, 0, port, 60)
	if err != nil { t.Fatal(err) }
	if err := c.Start(); err != nil { t.Fatal(err) }
	time.Sleep(8*time.Second)
	f, err := routers.New(routers.Config{Devices: 32, IPv6: 8, First4: devices4.Addr().Next(), First6: devices6.Addr().Next(),
	 To4: netip.AddrPortFrom(service4, port), To6: netip.AddrPortFrom(service6, port), Rate: 10, Records: 3, Refresh: 20, Retry: time.Second, NS: w.routers.Handle, Ramp: 20*time.Millisecond,
	 Notice: func(ev routers.Event) { fmt.Println(ev.Device.Addr, ev.Kind, ev.Protocol, ev.Err) }})
	if err != nil { t.Fatal(err) }
	f.Start(context.Background())
	time.Sleep(3*time.Second)
	f.Advance()
	time.Sleep(3*time.Second)
	f.Advance(); f.Storm()
	time.Sleep(6*time.Second)
	f.Stop()
	time.Sleep(2*time.Second)
	type k struct{ kind peers.Kind; ep uint32; a netip.Addr}
	got := map[k]int{}
	c.Poll(func(r peers.Record) { got[k{r.Kind, r.Epoch, r.Device}] += r.Count; if r.Kind == peers.Odd { fmt.Println(r.Text) } })
	for i, d := range f.Devices {
		for ep := uint32(1); ep <= 3; ep++ {
			if g, s := got[k{peers.Flows, ep, d.Addr}], f.Sent(routers.IPFIX, i, ep); g != s { fmt.Println(d.Addr, ep, "ipfix", g, s) }
			if g, s := got[k{peers.Route, ep, d.Addr}], f.Sent(routers.BMP, i, ep); g != s || i == 0 { fmt.Println(d.Addr, ep, "bmp", g, s) }
		}
	}
	fmt.Println(f.Total())
	os.Setenv("X", e.Dir)
	b, _ := os.ReadFile(e.Dir+"/nfacctd-0/log-1"); fmt.Println(string(b))
	b, _ = os.ReadFile(e.Dir+"/nfacctd-0/bmp-1.json"); fmt.Println(string(b)[:4000])
	b, _ = os.ReadFile(e.Dir+"/nfacctd-0/flows-1.json"); fmt.Println(string(b)[:600])
}
