# Builds the diagonal scan's kernel in several layouts and times each: bash benchmarks/diagonal_tiles_sweep.sh, in the
# root, on a machine with a GPU and nvcc; about 80 seconds on 16 cores.
W=$(mktemp -d)
make_one() {  # name, macros
  nvcc -std=c++20 -O3 -arch=sm_90a --expt-relaxed-constexpr -Icsrc "${@:2}" benchmarks/diagonal_tiles_sweep.cu -o $W/$1
}
for v in "8 4 4" "8 3 4" "4 8 4" "4 6 4" "8 4 2" "4 8 2" "8 2 4"; do set -- $v
  make_one warps_$1_blocks_$2_near_$3 -DWEFT_TILE_WARPS=$1 -DWEFT_TILE_BLOCKS=$2 -DWEFT_TILE_NEAR=$3 &
done
make_one warps_8_blocks_4_near_4_tiles_16 -DWEFT_TILES_PER_SM=16 &
make_one warps_4_blocks_8_near_4_tiles_16 -DWEFT_TILE_WARPS=4 -DWEFT_TILE_BLOCKS=8 -DWEFT_TILES_PER_SM=16 &
wait
for f in $W/*; do echo "== $(basename $f)"; timeout 15 $f || echo "exit $?"; done
