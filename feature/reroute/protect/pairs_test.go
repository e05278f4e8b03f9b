// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"testing"

	"github.com/weir-project/weir/feature/reroute/protect/bpf"
)

// Many learnt sizes for many repairs create a bounded number of devices. Each repair's answers name a size that fits.
func TestManySizesShareDevices(t *testing.T) {
	const repairs = 30
	w := newWorld(t)
	var paths []Path
	for i := range repairs {
		p := w.path(Repair{Segments: addrs(fmt.Sprintf("fc00:3::%x", i+0x100), sidDT6)})
		p.Name, p.Prefixes = fmt.Sprint("p", i), []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("fd00:d:%x::/48", i))}
		paths = append(paths, p)
	}
	w.apply(paths...)
	device := regexp.MustCompile(`(\d+): weir(\d+)@`)
	devices := func() map[int]int { // size by index
		out := map[int]int{}
		for _, m := range device.FindAllStringSubmatch(w.ip(w.r1, "-o link show"), -1) {
			index, _ := strconv.Atoi(m[1])
			out[index], _ = strconv.Atoi(m[2])
		}
		return out
	}
	own := len(devices()) // of the full size, for IPv6 and IPv4
	read := func() map[uint32]bpf.ProtectRerouteRepair {
		t.Helper()
		o, err := w.root.Open(instanceKey(netnsScope(w.r1)), pinRepairs, pinPaths, pinPrefixes)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		all, err := readRepairs(o)
		if err != nil || len(all) != repairs {
			t.Fatalf("%d repairs: %v", len(all), err)
		}
		return all
	}
	sizes, next := map[wayKey]uint32{}, uint32(1400)
	for _, r := range read() {
		sizes[newWayKey(&r)] = next
		next++
	}
	l, err := w.root.Lock(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	err = reconcileSizes(l, instanceKey(netnsScope(w.r1)), sizes)
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	there := devices()
	if len(there) > own+maxLearntPairs || len(there) < maxLearntPairs {
		t.Errorf("%d devices for %d sizes, want at most %d", len(there), 2*repairs, own+maxLearntPairs)
	}
	for _, r := range read() {
		six, four := there[int(r.Slow6)], there[int(r.Slow4)]
		if six == 0 || six > int(r.Mtu-r.Len6) || six < LeastMTU || four == 0 || four > int(r.Mtu-r.Len4) {
			t.Errorf("a repair that takes %d bytes answers with %d, for IPv4 %d", r.Mtu-r.Len6, six, four)
		}
	}
}
