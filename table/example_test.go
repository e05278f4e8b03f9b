// SPDX-License-Identifier: Apache-2.0

package table_test

import (
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/table"
	"github.com/weir-project/weir/table/tabletest"
)

// A table changes in place while a program reads it. [table.Find] returns the maps of a loaded
// collection.
func ExampleTable() {
	program, err := tabletest.Load(1) // in your program: kernel.Load, then table.Find
	if err != nil {
		fmt.Println(err)
		return
	}
	defer program.Close()
	t, err := table.Open(program.Maps)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer t.Close()
	for prefix, value := range map[string]uint32{"192.0.2.0/24": 1, "192.0.2.128/25": 2, "2001:db8::/32": 3} {
		if err := t.Set(netip.MustParsePrefix(prefix), value); err != nil {
			fmt.Println(err) // table.ErrFull
			return
		}
	}
	value, ok := t.Lookup(netip.MustParseAddr("192.0.2.200"))
	fmt.Println(value, ok) // 2 true: the longest prefix
}
