// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"context"
	"fmt"

	"github.com/weir-project/weir/workload"
)

// A reporter retains the workloads of its counters: they keep their names until they are reported, even after their end.
func ExampleTable_Retain() {
	table, err := workload.Open(workload.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go table.Run(ctx)
	waits := map[workload.ID]uint64{}
	for _, w := range table.All() {
		if _, ok := table.Retain(w.ID); ok {
			waits[w.ID] = 0
		}
	}
	for id := range waits {
		if w, ok := table.Get(id); ok {
			_ = w.Text // dnsd.service, 4f2a9c0d1e5b, reports
		}
		table.Release(id)
	}
}

func ExampleIdentify() {
	n := workload.Identify("/system.slice/docker-4f2a9c0d1e5b6a7788990011223344556677889900aabbccddeeff0011223344.scope")
	fmt.Println(n.Kind, n.Runtime, n.Text)
	n = workload.Identify("/system.slice/system-nfacctd.slice/nfacctd@1.service/worker")
	fmt.Println(n.Kind, n.Text)
	// Output:
	// container docker 4f2a9c0d1e5b
	// unit nfacctd@1.service
}
