// SPDX-License-Identifier: Apache-2.0

package sharktest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/feature/filter/filtertest"
)

// comparable are the random packets of which Wireshark sees what weir sees: neither broken (it complains about them), nor
// fragments, whose rest it may leave alone, nor with tags that have other fields there or are none here (0x9100) or options that come twice, nor with
// headers that weir does not look behind, nor with others inside. What these mean, the generated capture's labelled packets
// say one by one.
const comparable = `not (_ws.malformed or _ws.short or ip.flags.mf == 1 or ipv6.fraghdr.more == 1 or count(tcp.options.mss_val) > 1
	or _ws.expert.group == 0x07000000 or _ws.expert.group == 0x09000000
	or eth.type == 0x9100 or vlan.etype == 0x9100 or ieee8021ad or vlan.etype#3 or ipv6.fraghdr#2 or ipv6.dstopts.nxt#3 or ipv6.routing.nxt#3 or ipv6.hopopts.nxt#3 or ah.next_header#3
	or gre or icmp or icmpv6)`

// Fields of headers mean the same in packets of any kind.
func TestRandom(t *testing.T) {
	needTshark(t)
	t.Parallel()
	const seed = 6 // a fixed one: what Wireshark complains about is not known beforehand
	r := rand.New(rand.NewPCG(seed, 3))
	some := make([]packet, 7000)
	for i := range some {
		some[i] = packet{label: fmt.Sprint("random packet ", i+1), data: filtertest.Packet(r)}
	}
	c := writeCapture(t, "random packets", layers.LinkTypeEthernet, some)
	comparison{captures: []*capture{c}, pairs: pairs[:headers], only: comparable, least: 600}.run(t)
}
